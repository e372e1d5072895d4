"""Statistics of tokens: against plain float64, in one process and spread over two."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.rl.metrics import STATISTICS, PhaseTimer, TokenStatistics, global_percentiles, token_statistics
from megatron.rl.run_log import METRICS
from tests.unit_tests.distributed import run_ranks

SEED = 5


def _outputs(tokens: int, seed: int = SEED) -> dict[str, torch.Tensor]:
    """Tokens as the loss gives them, with weights on both sides of zero."""
    g = torch.Generator().manual_seed(seed)
    logmu = -torch.rand(tokens, generator=g) * 6
    logp = (logmu + torch.randn(tokens, generator=g) * 0.3).clamp(max=0)
    tv = (logp.exp() - logmu.exp()).abs()
    return {
        "logprobs": logp,
        "behavior_logprobs": logmu,
        "entropy": torch.rand(tokens, generator=g),
        "tv": tv,
        "ratio": (logp - logmu).exp(),
        "weight": 1 - torch.randn(tokens, generator=g).sign() * tv / 0.2,
    }


def _expected(outputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The same numbers by numpy, over all tokens at once."""
    x = {name: value.double().numpy() for name, value in outputs.items()}
    log_ratio = x["logprobs"] - x["behavior_logprobs"]
    quantiles = np.quantile(outputs["tv"].numpy(), [0.5, 0.9, 0.99], method="inverted_cdf")
    return {
        "policy/tokens": len(log_ratio),
        "policy/entropy": x["entropy"].mean(),
        "policy/nonfinite": 0,
        "tv/mean": x["tv"].mean(),
        "tv/p50": quantiles[0],
        "tv/p90": quantiles[1],
        "tv/p99": quantiles[2],
        "tv/max": x["tv"].max(),
        "ratio/mean": x["ratio"].mean(),
        "ratio/min": x["ratio"].min(),
        "ratio/max": x["ratio"].max(),
        "ratio/nonfinite": 0,
        "weight/mean": x["weight"].mean(),
        "weight/min": x["weight"].min(),
        "weight/max": x["weight"].max(),
        "weight/negative_share": (x["weight"] < 0).mean(),
        "mismatch/logprob": np.abs(log_ratio).mean(),
        "mismatch/tv": x["tv"].mean(),
        "mismatch/k3": (np.exp(log_ratio) - 1 - log_ratio).mean(),
    }


def _check(found: dict[str, float], outputs: dict[str, torch.Tensor]) -> None:
    expected = _expected(outputs)
    assert set(found) == set(expected) == set(STATISTICS)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert found["tv/p99"] == expected["tv/p99"]  # an order statistic has no rounding


@pytest.mark.parametrize("tokens", [1, 2, 3, 101, 997])
def test_one_batch_against_numpy(tokens):
    outputs = _outputs(tokens)
    _check(token_statistics(outputs, torch.ones(tokens, dtype=torch.bool)), outputs)


def test_the_fixture_has_weights_below_zero():
    assert 0 < _expected(_outputs(997))["weight/negative_share"] < 1


def test_masked_tokens_enter_nothing_whatever_they_hold():
    outputs = _outputs(12)
    padded = {
        name: torch.cat([value, torch.tensor([math.nan, math.inf, -math.inf])]) for name, value in outputs.items()
    }
    mask = torch.arange(15) < 12
    shaped = {name: value.view(3, 5) for name, value in padded.items()}
    _check(token_statistics(shaped, mask.view(3, 5)), outputs)


def test_micro_batches_add_up_and_reduce_forgets_nothing():
    outputs = _outputs(23)
    statistics = TokenStatistics()
    for part in (slice(0, 7), slice(7, 7), slice(7, 8)):
        values = {name: value[part] for name, value in outputs.items()}
        statistics.add(values, torch.ones_like(values["tv"], dtype=torch.bool))
    _check(statistics.reduce(), {name: value[:8] for name, value in outputs.items()})
    rest = {name: value[8:] for name, value in outputs.items()}
    statistics.add(rest, torch.ones(15, dtype=torch.bool))
    _check(statistics.reduce(), outputs)


def test_values_that_are_not_finite_are_counted_and_left_out():
    outputs = _outputs(9)
    outputs["ratio"][2], outputs["ratio"][5] = math.inf, math.nan
    outputs["entropy"][4] = math.nan
    outputs["weight"][4] = -math.inf
    found = token_statistics(outputs, torch.ones(9, dtype=torch.bool))
    assert (found["ratio/nonfinite"], found["policy/nonfinite"]) == (2, 1)
    kept = outputs["ratio"][torch.isfinite(outputs["ratio"])]
    assert found["ratio/max"] == kept.max().item()
    assert found["ratio/mean"] == pytest.approx(kept.double().mean().item())
    assert math.isfinite(found["policy/entropy"])
    weights = outputs["weight"][torch.isfinite(outputs["weight"])]
    assert found["weight/negative_share"] == pytest.approx((weights < 0).double().mean().item())


def test_a_quantity_without_a_finite_value_is_nan():
    outputs = _outputs(3)
    outputs["ratio"][:] = math.inf
    found = token_statistics(outputs, torch.ones(3, dtype=torch.bool))
    assert all(math.isnan(found[f"ratio/{end}"]) for end in ("mean", "min", "max"))
    assert found["ratio/nonfinite"] == 3


def test_a_large_log_ratio_has_a_finite_divergence():
    outputs = _outputs(1)
    outputs["logprobs"][0], outputs["behavior_logprobs"][0] = 0.0, -100.0  # r overflows float32, not float64
    assert token_statistics(outputs, torch.ones(1, dtype=torch.bool))["mismatch/k3"] == pytest.approx(math.exp(100))


def test_no_token_at_all_is_an_error():
    outputs = _outputs(4)
    with pytest.raises(RuntimeError, match="no rank has a sampled token"):
        token_statistics(outputs, torch.zeros(4, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="no rank has a sampled token"):
        TokenStatistics().reduce()


def test_wrong_arguments_are_named():
    outputs = _outputs(4)
    mask = torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask must be bool"):
        token_statistics(outputs, mask.float())
    with pytest.raises(ValueError, match=r"ratio has shape \(3,\)"):
        token_statistics(outputs | {"ratio": outputs["ratio"][:3]}, mask)
    del outputs["entropy"]
    with pytest.raises(ValueError, match="entropy is missing"):
        token_statistics(outputs, mask)


def test_every_statistic_is_documented():
    assert set(STATISTICS) <= METRICS.keys()
    assert len(set(STATISTICS)) == len(STATISTICS)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1009])
def test_percentiles_are_exact_order_statistics(count):
    g = torch.Generator().manual_seed(count)
    values = torch.rand(count, generator=g) * 10.0 ** torch.randint(-30, 1, (count,), generator=g)
    values[: count // 3] = 0.0
    percents = (1, 50, 90, 99, 100)
    ordered = sorted(values.tolist())
    assert global_percentiles(values, percents) == [ordered[math.ceil(p * count / 100) - 1] for p in percents]


def test_percentiles_of_ties_zeros_and_subnormals():
    values = torch.tensor([0.0, -0.0, 1e-45, 1e-45, 1.0])
    assert global_percentiles(values, (40, 41, 80, 81)) == [0.0, values[2].item(), values[2].item(), 1.0]
    assert math.isnan(global_percentiles(torch.empty(0), (50,))[0])


# The cuts of 211 tokens over two ranks: even, uneven, one rank without a token, one without a micro-batch.
CUTS = ([0, 105, 211], [0, 1, 211], [0, 0, 211], [0, 211, 211])


def _two_ranks(rank: int, world_size: int) -> dict[str, object]:
    outputs = _outputs(211)
    group = dist.group.WORLD
    found: dict[str, object] = {"cuts": []}
    for cut in CUTS:
        mine = {name: value[cut[rank] : cut[rank + 1]] for name, value in outputs.items()}
        statistics = TokenStatistics()
        if cut != CUTS[-1] or rank == 0:
            statistics.add(mine, torch.ones_like(mine["tv"], dtype=torch.bool))
        found["cuts"].append(statistics.reduce(group))
    try:
        TokenStatistics().reduce(group)
    except RuntimeError as error:
        found["empty"] = str(error)
    stages = TokenStatistics()  # two pipeline stages: rank 1 is the last and the only one with tokens
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    if rank == 1:
        stages.add(outputs, torch.ones(211, dtype=torch.bool))
    found["pipeline"] = stages.reduce(alone, group)
    try:
        TokenStatistics().reduce(alone, group)
    except RuntimeError as error:
        found["empty pipeline"] = str(error)
    return found


def test_two_ranks_give_the_numbers_of_one_process():
    first, second = run_ranks(2, _two_ranks)
    assert first == second
    assert len(first["cuts"]) == len(CUTS)
    for found in [*first["cuts"], first["pipeline"]]:
        _check(found, _outputs(211))
    assert "no rank" in first["empty"]
    assert "no rank" in first["empty pipeline"]


def test_phases_add_up_and_start_anew():
    ticks = itertools.count()
    entered = []
    timer = PhaseTimer(on_enter=entered.append, clock=lambda: next(ticks))
    for name in ("rollout", "train", "train"):
        with timer.phase(name):
            pass
    assert timer.take() == (7, {"time/rollout": 1, "time/train": 2})
    assert timer.take() == (1, {})
    assert entered == ["rollout", "train", "train"]


def test_a_phase_left_by_an_exception_is_timed_and_closed():
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("train"):
        raise KeyError
    with timer.phase("sync"):
        pass
    assert set(timer.take()[1]) == {"time/train", "time/sync"}


def test_phases_do_not_nest():
    timer = PhaseTimer()
    with timer.phase("train"), pytest.raises(RuntimeError, match="sync begins inside phase train"), timer.phase("sync"):
        pass
