"""DRPO with the exact penalty over candidates, against autograd in float64."""

import pytest
import torch

from megatron.rl.objectives import get_objective

NAN, INF = float("nan"), float("inf")


def case(tokens: int = 200, candidates: int = 5, seed: int = 0):
    """Log-probabilities of the sampled token and candidates, some of which are absent or of probability 0."""
    generator = torch.Generator().manual_seed(seed)
    logp = torch.randn(tokens, 50, generator=generator).mul(3).log_softmax(1)[:, : 1 + candidates]
    logmu = (logp + 0.5 * torch.randn(logp.shape, generator=generator)).clamp(max=-1e-6)
    absent = torch.rand(logp.shape, generator=generator) < 0.2
    impossible = torch.rand(logp.shape, generator=generator) < 0.1
    absent[:, 0] = impossible[:, 0] = False
    logmu[impossible] = -INF
    logmu[absent] = NAN
    return logp, logmu, torch.randn(tokens, generator=generator)


def reference(logp: torch.Tensor, logmu: torch.Tensor, advantage: torch.Tensor, delta: float):
    logp = logp.double().requires_grad_(True)
    mu, present = logmu.double().exp().nan_to_num(0), ~logmu.isnan()
    pi, advantage = logp.exp(), advantage.double()
    gain = (logp[:, 0] - logmu[:, 0].double()).exp() * advantage
    value = gain - advantage.abs() / (2 * delta) * (present * (pi - mu) ** 2).sum(1)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    return value.detach(), slope


@pytest.mark.parametrize("delta", [0.2, 12.5])
@pytest.mark.parametrize("candidates", [0, 1, 5])
def test_value_and_slopes_equal_float64_autograd(candidates, delta):
    inputs = case(candidates=candidates)
    value, slope = get_objective("drpo-topk", delta=delta)(*inputs)
    expected_value, expected_slope = reference(*inputs, delta)
    assert value.dtype == slope.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected_value, rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(slope.double(), expected_slope, rtol=2e-5, atol=1e-7)


def test_absent_candidate_adds_exactly_nothing():
    logp, logmu, advantage = case()
    objective = get_objective("drpo-topk", delta=0.2)
    more = [torch.cat([x, torch.full((len(x), 2), fill)], dim=1) for x, fill in ((logp, -3.0), (logmu, NAN))]
    value, slope = objective(logp, logmu, advantage)
    wide_value, wide_slope = objective(*more, advantage)
    torch.testing.assert_close(wide_value, value, rtol=1e-6, atol=1e-7)
    assert torch.equal(wide_slope[:, : slope.shape[1]], slope) and (wide_slope[:, slope.shape[1] :] == 0).all()


def test_penalty_is_what_drpos_is_an_estimate_of():
    """Over tokens sampled from mu, DRPO's mean penalty mu (r - 1)^2 is the sum over the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logmu, logp = (torch.randn(1, 7, generator=generator).log_softmax(1) for _ in range(2))
    others = torch.tensor([[y, *(a for a in range(7) if a != y)] for y in range(7)])
    one, advantages, delta = torch.ones(7), torch.ones(7), 0.3
    exact, _ = get_objective("drpo-topk", delta=delta)(logp[0][others], logmu[0][others], advantages)
    sampled, _ = get_objective("drpo", delta=delta)(logp[0], logmu[0], one)
    torch.testing.assert_close((logmu[0].exp() * sampled).sum(), (logmu[0].exp() * exact).sum())
