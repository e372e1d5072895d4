"""GSPO against autograd in float64."""

import pytest
import torch

from megatron.rl.objectives import get_objective

LOW, HIGH = 0.03, 0.04


def case(lengths: list[int], seed: int = 0):
    """Tokens of several sequences, shuffled."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.full((length,), 10 * k) for k, length in enumerate(lengths)])
    ids = ids[torch.randperm(len(ids), generator=generator)]
    logmu = -3 * torch.rand(len(ids), generator=generator)
    shift = 0.1 * torch.randn(10 * len(lengths) + 1, generator=generator)[ids]
    logp = logmu + shift + 0.1 * torch.randn(len(ids), generator=generator)
    advantage = torch.randn(10 * len(lengths) + 1, generator=generator)[ids]
    weights = torch.rand(len(ids), generator=generator)
    return logp, logmu, advantage, weights, ids


def reference(logp, logmu, advantage, weights, ids):
    logp = logp.double().requires_grad_(True)
    ratio = torch.stack([(logp - logmu.double())[ids == one].mean().exp() for one in ids]) if len(ids) else logp.exp()
    advantage = advantage.double()
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    (slope,) = torch.autograd.grad((weights.double() * value).sum(), logp)
    return value.detach(), slope


@pytest.mark.parametrize("lengths", [[5, 9, 1, 30], [1], [1, 1, 1], [200]])
def test_value_and_slope_equal_float64_autograd(lengths):
    inputs = case(lengths)
    value, slope = get_objective("gspo", eps_low=LOW, eps_high=HIGH)(*inputs)
    expected_value, expected_slope = reference(*inputs)
    assert value.dtype == slope.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope.double(), expected_slope, rtol=1e-5, atol=1e-6)


def test_clip_is_met_on_both_sides():
    """The sequences above go past both bounds, in both directions, and stay inside: each branch is compared."""
    logp, logmu, advantage, _, ids = case([5, 9, 1, 30])
    excess = torch.stack([(logp - logmu)[ids == one].mean().expm1() for one in ids])
    assert (excess > HIGH).any() and (excess < -LOW).any() and (excess.abs() < LOW).any()


def test_no_tokens():
    empty = torch.empty(0)
    value, slope = get_objective("gspo")(empty, empty, empty, empty, torch.empty(0, dtype=torch.long))
    assert value.shape == slope.shape == (0,)
