"""Numerics of the softmax passes at the sizes and magnitudes that break naive ones."""

import pytest
import torch

from megatron.rl.ops import fused_linear_logprobs
from megatron.rl.ops.elementwise import plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 2, 3, 127, 129_920, 151_937])
def test_log_probabilities_are_never_positive(vocab_size, dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = (3 * torch.randn(7, 4, generator=generator)).to(dtype)
    weight = torch.randn(vocab_size, 4, generator=generator).to(dtype)
    logits = hidden.double() @ weight.double().t()
    for targets in (logits.argmax(1), logits.argmin(1)):
        output = fused_linear_logprobs(hidden, weight, targets, vocab_size=vocab_size, return_entropy=True)
        assert (output.logprobs <= 0).all()
        expected = logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
        # Logits carry the rounding of the product's type, half a unit in the last place of the largest.
        tolerance = 2 * torch.finfo(dtype).eps * logits.abs().max().item()
        torch.testing.assert_close(output.logprobs.double(), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e30])
def test_a_common_offset_of_the_logits_changes_nothing(offset):
    """One hidden unit adds the offset to every logit; equal logits stay exactly equal whatever it is."""
    hidden = torch.tensor([[offset, 1.0]])
    weight = torch.tensor([[1.0, 0.0]] * 5)
    output = fused_linear_logprobs(hidden, weight, torch.tensor([2]), vocab_size=5, return_entropy=True)
    expected = torch.log(torch.tensor([5.0]))
    torch.testing.assert_close(-output.logprobs, expected)
    torch.testing.assert_close(output.entropy, expected)


def test_certain_token_has_no_entropy_and_no_gradient():
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[200.0], [-200.0], [0.0]])
    output = fused_linear_logprobs(hidden, weight, torch.tensor([0]), vocab_size=3, return_entropy=True)
    (output.logprobs + output.entropy).sum().backward()
    assert output.logprobs.item() == 0 and output.entropy.item() == 0
    assert hidden.grad.item() == 0


def test_impossible_token_has_a_finite_log_probability():
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[200.0], [-200.0]])
    assert fused_linear_logprobs(hidden, weight, torch.tensor([1]), vocab_size=2).logprobs.item() == -400


@pytest.mark.parametrize("elements", [1, 100, 97 * 61, 1 << 20])
def test_results_do_not_depend_on_the_block_of_rows(monkeypatch, elements):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(61, 24, generator=generator)
    weight = torch.randn(97, 24, generator=generator)
    targets = torch.randint(97, (61,), generator=generator)

    def solve():
        leaf = hidden.clone().requires_grad_(True)
        output = fused_linear_logprobs(
            leaf, weight, targets, vocab_size=97, return_entropy=True, temperature=torch.linspace(0.5, 2, 61)
        )
        (output.logprobs + output.entropy).sum().backward()
        return output.logprobs.detach(), output.entropy.detach(), leaf.grad

    expected = solve()
    monkeypatch.setitem(plain._BLOCK_ELEMENTS, "cpu", elements)
    for got, wanted in zip(solve(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
