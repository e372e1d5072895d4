"""Values and derivatives of all objectives against autograd in float64, and refusals."""

import math

import pytest
import torch

from megatron.rl.errors import ConfigError
from megatron.rl.objectives import OBJECTIVES, TOKEN_OBJECTIVES, get_objective, parameters_of
from tests.unit_tests.rl.objectives.reference import FORMULAS, reference

UNWEIGHTED = ["drpo", "spo", "kl", "tv"]
VARIANTS = [(name, True) for name in FORMULAS] + [(name, False) for name in UNWEIGHTED]
LOG_RATIO_BOUNDS = [math.log(0.8), math.log(1.28), math.log(1.2), 0.0]
FLOAT32_MAX = torch.finfo(torch.float32).max


def grid(delta: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 (logp, logmu, advantage) around every boundary, at every size of mu, and at log-ratios of +-50."""
    pairs = []
    for mu in (1e-30, 1e-6, 1e-3, 0.05, 0.3, 0.5, 0.79, 0.81, 0.95, 1 - 1e-3, 1 - 1e-6):
        shifts = [side * delta * factor for side in (-1, 1) for factor in (0.5, 0.99, 1.01, 1.5)]
        ratios = [math.exp(bound + step) for bound in LOG_RATIO_BOUNDS for step in (-1e-3, -3e-5, 3e-5, 1e-3)] + [1]
        candidates = [mu + shift for shift in shifts] + [mu * ratio for ratio in ratios]
        pairs += [(math.log(pi), math.log(mu)) for pi in candidates if 0 < pi < 1]
    pairs += [(-0.01, -50.01), (-50.01, -0.01), (-52.0, -102.0), (-102.0, -52.0), (-1e-6, -1e-3), (-1e-3, -1e-6)]
    rows = [(logp, logmu, a) for logp, logmu in pairs for a in (-2.0, -0.3, 0.0, 0.3, 2.0)]
    return tuple(torch.tensor(rows, dtype=torch.float32).unbind(1))  # type: ignore[return-value]


def near_a_boundary(name: str, logp: torch.Tensor, logmu: torch.Tensor, delta: float) -> torch.Tensor:
    """Points so close to a jump of the formula that rounding of float32 inputs decides the side."""
    logp, logmu = logp.double(), logmu.double()
    shift = (logp.exp() - logmu.exp()).abs()
    near = (shift / delta - 1).abs() < 1e-5 if "mask" in name or name == "dppo" else torch.zeros_like(shift).bool()
    if name == "grpo":
        for bound in LOG_RATIO_BOUNDS[:2]:
            near |= (logp - logmu - bound).abs() < 1e-5
    return near


BOUNDS = {"delta": (0.3, 0.02), "eps": (0.2, 0.5), "eps_low": (0.2, 0.5), "eps_high": (0.28, 0.7)}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "drpo-topk"])
def test_an_objective_reads_its_own_parameters_and_no_others(name, bound):
    logp, logmu, advantage = grid(0.1)
    rest = (torch.ones_like(logp), torch.arange(len(logp))) if name == "gspo" else ()
    outcomes = [get_objective(name, **{bound: value})(logp, logmu, advantage, *rest) for value in BOUNDS[bound]]
    same = all(torch.equal(first, second) for first, second in zip(*outcomes, strict=True))
    assert same == (bound not in parameters_of(name))


@pytest.mark.parametrize("delta", [0.2, 12.5])
@pytest.mark.parametrize(("name", "advantage_weight"), VARIANTS)
def test_value_and_slope_equal_float64_autograd(name, advantage_weight, delta):
    logp, logmu, advantage = grid(delta)
    value, slope = get_objective(name, delta=delta, advantage_weight=advantage_weight)(logp, logmu, advantage)
    assert value.dtype == slope.dtype == torch.float32
    expected_value, expected_slope = reference(
        name, logp, logmu, advantage, delta=delta, advantage_weight=advantage_weight
    )
    keep = ~near_a_boundary(name, logp, logmu, delta)
    assert keep.float().mean() > 0.95
    gain = ((logp.double() - logmu.double()).exp() * advantage.double()).abs()
    for got, expected in ((value, expected_value), (slope, expected_slope)):
        # J and its slope are differences of a gain and a penalty: float32 is accurate to the larger of the two.
        error = (got.double() - expected).abs() / (gain + (expected - gain).abs() + 1e-30)
        overflow = expected.abs() > FLOAT32_MAX
        assert torch.equal(torch.isinf(got)[keep], overflow[keep])
        assert error[keep & ~overflow].max() < 2e-5


@pytest.mark.parametrize(("name", "advantage_weight"), VARIANTS)
def test_autograd_of_the_value_is_the_slope(name, advantage_weight):
    generator = torch.Generator().manual_seed(3)
    logp = torch.empty(500).uniform_(-6, -0.01, generator=generator).requires_grad_(True)
    logmu = torch.empty(500).uniform_(-6, -0.01, generator=generator)
    advantage = torch.randn(500, generator=generator)
    value, slope = get_objective(name, delta=0.2, advantage_weight=advantage_weight)(logp, logmu, advantage)
    (by_autograd,) = torch.autograd.grad(value.sum(), logp)
    torch.testing.assert_close(by_autograd, slope.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("logmu", [float("-inf"), float("inf"), float("nan")])
def test_masked_token_adds_exactly_nothing(name, logmu):
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = torch.tensor([1.0, 1.0])
    value, slope = get_objective(name, delta=0.2)(logp, torch.tensor([logmu, -2.5]), advantage)
    alone, alone_slope = get_objective(name, delta=0.2)(logp[1:], torch.tensor([-2.5]), advantage[1:])
    assert value[0] == 0 and slope[0] == 0
    assert value[1] == alone[0] and slope[1] == alone_slope[0]
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    assert gradient[0] == 0 and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", FORMULAS)
def test_equal_policies_have_ratio_one(name):
    logp = torch.tensor([0.0, -1e-7, -0.7, -30.0, -100.0])
    advantage = torch.tensor([1.0, -1.0, 0.5, 2.0, -3.0])
    value, slope = get_objective(name, delta=0.2)(logp, logp, advantage)
    torch.testing.assert_close(value, advantage, rtol=0, atol=0)
    expected = advantage + advantage.abs() / 0.4 if name == "kl" else advantage
    torch.testing.assert_close(slope, expected)


def test_drpo_is_finite_where_the_naive_penalty_overflows():
    """mu (r - 1)^2 is infinite in float32 at a log-ratio of 50; (pi - mu) (r - 1) is not."""
    logp, logmu = torch.tensor([-0.1]), torch.tensor([-50.1])
    assert torch.isinf(logmu.exp() * ((logp - logmu).exp() - 1) ** 2)
    value, slope = get_objective("drpo", delta=0.2)(logp, logmu, torch.tensor([1.0]))
    assert torch.isfinite(value).all() and torch.isfinite(slope).all()


def test_overflowing_ratio_is_not_clamped():
    value, slope = get_objective("pg")(torch.tensor([-0.1]), torch.tensor([-91.0]), torch.tensor([1.0]))
    assert torch.isinf(value).all() and torch.isinf(slope).all()


def test_small_differences_keep_their_digits():
    """At delta = 1e-7 DRPO's weight hangs on a probability shift of 1e-7, which exp(logp) - exp(logmu) loses."""
    logmu = torch.tensor([-0.25])
    logp = torch.nextafter(logmu, torch.tensor([0.0]))
    _, slope = get_objective("drpo", delta=1e-7)(logp, logmu, torch.tensor([1.0]))
    _, expected = reference("drpo", logp, logmu, torch.tensor([1.0]), delta=1e-7)
    torch.testing.assert_close(slope.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5)])
def test_any_shape(shape):
    logp = -torch.rand(shape)
    value, slope = get_objective("drpo")(logp, logp - 0.1, torch.ones(shape))
    assert value.shape == slope.shape == shape


def test_low_precision_inputs_are_computed_in_float32():
    logp, logmu, advantage = torch.tensor([-1.3]), torch.tensor([-1.0]), torch.tensor([0.5])
    value, slope = get_objective("drpo")(logp.bfloat16(), logmu.bfloat16(), advantage.bfloat16())
    assert value.dtype == slope.dtype == torch.float32


def test_names_are_those_of_the_formula_sheet():
    assert set(TOKEN_OBJECTIVES) == set(FORMULAS)


def test_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"pg, grpo, .*drpo.* \(got 'drop'\)"):
        get_objective("drop")


@pytest.mark.parametrize("bound", ["delta", "eps", "eps_low", "eps_high"])
@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf")])
def test_bound_that_is_not_positive_is_refused(bound, size):
    with pytest.raises(ConfigError, match=rf"^{bound} .*\(got {size}\)$"):
        get_objective("drpo", **{bound: size})


@pytest.mark.parametrize("name", [name for name in FORMULAS if name not in UNWEIGHTED])
def test_advantage_weight_cannot_be_switched_off_elsewhere(name):
    with pytest.raises(ConfigError, match=rf"drpo, spo, kl, tv only \(got '{name}'\)"):
        get_objective(name, advantage_weight=False)
