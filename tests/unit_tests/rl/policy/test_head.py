"""The head between Megatron's [sequence, batch] hidden states and the [batch, sequence] of everything else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.rl.objectives import get_objective
from megatron.rl.policy.head import HeadRequest, LossInputs, policy_head

BATCH, LENGTH, HIDDEN, VOCAB, PADDED = 3, 5, 8, 11, 16


@pytest.fixture
def inputs() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    mask = torch.rand(BATCH, LENGTH, generator=generator) < 0.6
    mask[1] = False  # a row without a sample
    return SimpleNamespace(
        hidden=randn(LENGTH, BATCH, HIDDEN).requires_grad_(),
        weight=randn(PADDED, HIDDEN).requires_grad_(),
        targets=torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator),
        mask=mask,
        behavior=-randn(BATCH, LENGTH).abs() - 0.1,
        advantages=randn(BATCH, LENGTH),
        sequence_ids=torch.arange(BATCH).unsqueeze(1).expand(BATCH, LENGTH),
        loss_weights=mask * torch.rand(BATCH, LENGTH, generator=generator),
    )


def _request(inputs: SimpleNamespace, with_loss: bool = True, **changes: Any) -> HeadRequest:
    values: dict[str, Any] = {
        "targets": inputs.targets,
        "mask": inputs.mask,
        "vocab_size": VOCAB,
        "temperature": 0.7,
        "tp_group": None,
        "sequence_parallel": False,
        "token_chunk": 4,
    }
    if with_loss:
        values["loss"] = LossInputs(inputs.behavior, inputs.advantages, inputs.loss_weights, inputs.sequence_ids)
        values["objective"] = get_objective("drpo", delta=0.2)
    return HeadRequest(**{**values, **changes})


def _run(inputs: SimpleNamespace, request: HeadRequest, tied: bool = False) -> torch.Tensor:
    other = torch.nn.Linear(HIDDEN, PADDED)  # must not be used where the weight is tied
    return policy_head(
        hidden_states=inputs.hidden,
        output_layer=other if tied else SimpleNamespace(weight=inputs.weight),  # type: ignore[arg-type]
        output_weight=inputs.weight if tied else None,
        context=request,
        labels=None,  # Megatron passes more than the head asks for
    )


def _log_probs(inputs: SimpleNamespace, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[batch, sequence, VOCAB] by the definition."""
    return (hidden.transpose(0, 1) @ weight[:VOCAB].T / 0.7).log_softmax(-1)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_gradients_and_tokens_are_those_of_the_definition(inputs, tied):
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    log_probs = _log_probs(inputs, hidden, weight)
    logp = log_probs.gather(2, inputs.targets[..., None])[..., 0]
    mu, advantage = inputs.behavior.double().exp(), inputs.advantages.double()
    ratio = logp.exp() / mu
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    j = ratio * advantage - advantage.abs() / 0.4 * mu * (ratio - 1) ** 2 + 0.3 * entropy
    exact = -(inputs.loss_weights * j).sum()
    exact.backward()

    request = _request(inputs, entropy_coeff=0.3)
    loss = _run(inputs, request, tied)
    loss.backward()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    torch.testing.assert_close(inputs.hidden.grad.double(), hidden.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(inputs.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)

    expected = {
        "logprobs": logp,
        "entropy": entropy,
        "tv": (logp.exp() - mu).abs(),
        "ratio": ratio,
        "weight": 1 - advantage.sign() * (logp.exp() - mu) / 0.2,
    }
    assert request.tokens.keys() == expected.keys()
    for name, values in request.tokens.items():
        assert values.shape == (BATCH, LENGTH) and values.dtype == torch.float32 and not values.requires_grad
        torch.testing.assert_close(values[inputs.mask], expected[name][inputs.mask].float(), rtol=1e-4, atol=1e-5)


def test_an_objective_of_sequences_gets_them(inputs):
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    logp = _log_probs(inputs, hidden, weight).gather(2, inputs.targets[..., None])[..., 0]
    trained = inputs.loss_weights > 0
    log_ratio = torch.where(trained, logp - inputs.behavior.double(), 0.0)
    ratio = (log_ratio.sum(1) / trained.sum(1).clamp(min=1)).exp()[:, None]
    advantage = inputs.advantages[:, :1].double().expand(BATCH, LENGTH)
    j = torch.minimum(ratio * advantage, ratio.clamp(1 - 0.3, 1 + 0.4) * advantage)
    exact = -(inputs.loss_weights * j).sum()
    exact.backward()

    inputs.advantages = advantage.float()
    request = _request(inputs, objective=get_objective("gspo", eps_low=0.3, eps_high=0.4))
    loss = _run(inputs, request)
    loss.backward()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(inputs.hidden.grad.double(), hidden.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(inputs.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-6)


def test_a_pass_without_loss_gives_logprobs_and_entropy(inputs):
    inputs.targets[~inputs.mask] = VOCAB + 99  # whatever padding stands there
    request = _request(inputs, with_loss=False)
    with torch.no_grad():
        output = _run(inputs, request)
    assert output.shape == () and output.item() == 0 and output.dtype == torch.float32
    log_probs = _log_probs(inputs, inputs.hidden.detach(), inputs.weight.detach())
    logp = log_probs.gather(2, inputs.targets.clamp(max=VOCAB - 1)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert request.tokens.keys() == {"logprobs", "entropy"}
    torch.testing.assert_close(request.tokens["logprobs"][inputs.mask], logp[inputs.mask])
    torch.testing.assert_close(request.tokens["entropy"][inputs.mask], entropy[inputs.mask])


def test_masked_tokens_add_exactly_nothing(inputs):
    loss = _run(inputs, _request(inputs))
    loss.backward()
    gradient = inputs.hidden.grad.clone()
    assert torch.all(gradient.transpose(0, 1)[~inputs.mask] == 0)
    inputs.hidden.grad = None
    inputs.behavior[~inputs.mask] = float("nan")
    inputs.advantages[~inputs.mask] = float("inf")
    again = _run(inputs, _request(inputs))
    again.backward()
    assert torch.equal(again, loss) and torch.equal(inputs.hidden.grad, gradient)


def test_bfloat16_hidden_states_keep_float32_tokens(inputs):
    inputs.hidden, inputs.weight = (x.detach().bfloat16() for x in (inputs.hidden, inputs.weight))
    request = _request(inputs)
    assert _run(inputs, request).dtype == torch.float32
    assert {values.dtype for values in request.tokens.values()} == {torch.float32}


def test_a_loss_needs_its_objective(inputs):
    with pytest.raises(ValueError, match="needs its objective"):
        _run(inputs, _request(inputs, objective=None))
