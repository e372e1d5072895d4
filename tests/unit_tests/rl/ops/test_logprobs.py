"""Differentiable log-probabilities on one rank, against whole logits in float64."""

import pytest
import torch

from megatron.rl.ops import TokenError, fused_linear_logprobs
from tests.unit_tests.rl.ops.reference import padded, relative_error


def inputs(tokens=61, hidden_size=24, vocab_size=97, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) * 0.4).to(dtype)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    slopes = torch.randn(2, tokens, generator=generator)
    slopes[:, ::3] = 0  # tokens that a caller masks
    return hidden, weight, targets, slopes


def whole_logits(hidden, weight, targets, slopes, temperature, dtype=torch.float64, with_entropy=True):
    """(logprobs, entropy, logsumexp, grad_hidden, grad_weight), as in the reference of the loss."""
    softmax_type = torch.float32 if dtype is None else dtype
    hidden = (hidden if dtype is None else hidden.to(dtype)).clone().requires_grad_(True)
    weight = (weight if dtype is None else weight.to(dtype)).clone().requires_grad_(True)
    logits = (hidden @ weight.t()).to(softmax_type) / temperature
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax.gather(1, targets.unsqueeze(1)).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    loss = (logprobs * slopes[0]).sum() + with_entropy * (entropy * slopes[1]).sum()
    return logprobs, entropy, logits.logsumexp(-1), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("token_chunk", [None, 1, 10])
@pytest.mark.parametrize("temperature", [1.0, 0.6, torch.linspace(0.5, 1.5, 61)])
def test_values_and_gradients(with_entropy, token_chunk, temperature):
    hidden, weight, targets, slopes = inputs()
    column = temperature.double().unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
    expected = whole_logits(hidden, weight, targets, slopes, column, with_entropy=with_entropy)
    hidden.requires_grad_(True)
    wide = padded(weight, 64).requires_grad_(True)
    output = fused_linear_logprobs(
        hidden,
        wide,
        targets,
        vocab_size=97,
        temperature=temperature,
        return_entropy=with_entropy,
        token_chunk=token_chunk,
    )
    loss = (output.logprobs * slopes[0]).sum()
    if with_entropy:
        loss = loss + (output.entropy * slopes[1]).sum()
    else:
        assert output.entropy is None
    loss.backward()
    assert not output.logsumexp.requires_grad and output.logprobs.dtype == torch.float32
    got = (output.logprobs, output.entropy, output.logsumexp, hidden.grad, wide.grad[:97])
    for ours, truth in zip(got, expected, strict=True):
        assert ours is None or relative_error(ours, truth) < 2e-6
    assert (wide.grad[97:] == 0).all()


def test_entropy_alone_can_be_differentiated():
    hidden, weight, targets, slopes = inputs()
    expected = whole_logits(hidden, weight, targets, torch.stack([torch.zeros(61), slopes[1]]), 1.0)
    hidden.requires_grad_(True)
    output = fused_linear_logprobs(hidden, weight, targets, vocab_size=97, return_entropy=True)
    (output.entropy * slopes[1]).sum().backward()
    assert relative_error(hidden.grad, expected[3]) < 2e-6


@pytest.mark.parametrize("sizes", [(507, 123, 1009), (123, 507, 499)])
def test_error_in_bfloat16_is_that_of_the_plain_path(sizes):
    hidden, weight, targets, slopes = inputs(*sizes, dtype=torch.bfloat16)
    truth = whole_logits(hidden, weight, targets, slopes, 0.6)
    plain = whole_logits(hidden, weight, targets, slopes, 0.6, dtype=None)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    output = fused_linear_logprobs(
        hidden, weight, targets, vocab_size=sizes[2], temperature=0.6, return_entropy=True, token_chunk=100
    )
    ((output.logprobs * slopes[0]).sum() + (output.entropy * slopes[1]).sum()).backward()
    got = (output.logprobs, output.entropy, output.logsumexp, hidden.grad, weight.grad)
    for ours, measure, expected in zip(got, plain, truth, strict=True):
        assert relative_error(ours, expected) <= 1.1 * relative_error(measure, expected)


def test_without_gradients():
    hidden, weight, targets, _ = inputs()
    with torch.no_grad():
        output = fused_linear_logprobs(hidden.requires_grad_(True), weight, targets, vocab_size=97)
    assert not output.logprobs.requires_grad


def test_backward_twice_adds_up():
    hidden, weight, targets, slopes = inputs()
    hidden.requires_grad_(True)
    loss = (fused_linear_logprobs(hidden, weight, targets, vocab_size=97).logprobs * slopes[0]).sum()
    loss.backward(retain_graph=True)
    once = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * once)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_no_tokens(return_entropy):
    hidden, weight, targets, _ = inputs(tokens=0)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    output = fused_linear_logprobs(hidden, weight, targets, vocab_size=97, return_entropy=return_entropy)
    output.logprobs.sum().backward()
    assert hidden.grad.shape == (0, 24) and (weight.grad == 0).all()


@pytest.mark.parametrize("target", [-100, 97])
def test_target_outside_the_vocabulary_is_refused(target):
    hidden, weight, targets, _ = inputs()
    targets[11] = target
    with pytest.raises(TokenError, match=rf"token 11 \(got {target}\)"):
        fused_linear_logprobs(hidden, weight, targets, vocab_size=97)
