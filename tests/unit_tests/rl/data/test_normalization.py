"""The objective and its gradient against float64 references, over cuts, data-parallel and context-parallel layouts.

The model here is one vector x: J of the token with target id k is advantage * sin(x[k]), so the gradient names
every token that took part, and with which weight.
"""

import math

import pytest
import torch
import torch.distributed as dist

from megatron.rl.config import BatchingConfig, LossNormalizationConfig
from megatron.rl.data import Cut, MicroBatcher, TokenBatch, collate, context_share, loss_weights
from megatron.rl.errors import ConfigError, RolloutError
from megatron.rl.types import Sample
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.data.samples import make_sample

LENGTH = 16
VOCABULARY = 1000
TOKEN_MEAN = LossNormalizationConfig("token-mean")
SEQ_MEAN = LossNormalizationConfig("seq-mean-token-sum-norm", horizon=13)
CONFIGS = [TOKEN_MEAN, SEQ_MEAN]


def mini_batch() -> list[Sample]:
    """Uneven on purpose: lengths 1 to 9, one empty response, seven samples for two ranks."""
    shape = [(3, 4), (1, 1), (7, 9), (2, 0), (5, 2), (1, 9), (6, 7)]
    return [
        make_sample(prompt, response, advantage=(-1) ** i * (i + 1.0), first_id=100 * i)
        for i, (prompt, response) in enumerate(shape)
    ]


def gradient(batches: list[TokenBatch], config: LossNormalizationConfig, group=None) -> torch.Tensor:
    """This rank's part of the gradient of the objective, float32 [VOCABULARY]."""
    x = torch.linspace(0, 1, VOCABULARY, requires_grad=True)
    for batch, weights in zip(batches, loss_weights(batches, config, group), strict=True):
        (weights * batch.advantages * torch.sin(x[batch.targets])).sum().backward()
    assert x.grad is not None
    return x.grad


def expected_gradient(samples: list[Sample], config: LossNormalizationConfig) -> torch.Tensor:
    """From the definitions, sample by sample, in float64."""
    x = torch.linspace(0, 1, VOCABULARY, dtype=torch.float64)
    lengths = [len(sample.completion.token_ids) for sample in samples]
    result = torch.zeros(VOCABULARY, dtype=torch.float64)
    for sample in samples:
        for token in sample.completion.token_ids:
            by_mean = sum(lengths)
            by_sequence = 13 * sum(length > 0 for length in lengths)
            divisor = by_mean if config.mode == "token-mean" else by_sequence
            result[token] += sample.advantage * math.cos(x[token]) / divisor
    return result


def cut(samples: list[Sample], dp_rank: int, dp_size: int, micro: int, multiple: int = LENGTH) -> list[TokenBatch]:
    config = BatchingConfig(micro, total_multiple=multiple)
    return MicroBatcher(config, dp_rank=dp_rank, dp_size=dp_size)(samples)


def packed(samples: list[Sample], dp_rank: int, dp_size: int, budget: int, cp: tuple[int, int]) -> list[TokenBatch]:
    config = BatchingConfig(1, budget, packed=True, sequence_multiple=2 * cp[1], total_multiple=2 * cp[1])
    return MicroBatcher(config, dp_rank=dp_rank, dp_size=dp_size, cp_rank=cp[0], cp_size=cp[1])(samples)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
@pytest.mark.parametrize("micro", [1, 2, 3, 7, 10])
def test_gradient_does_not_depend_on_the_cut_into_micro_batches(config, micro):
    assert_close(gradient(cut(mini_batch(), 0, 1, micro), config), expected_gradient(mini_batch(), config))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.mode)
def test_padding_changes_nothing(config):
    batches = cut(mini_batch(), 0, 1, 2, multiple=128)
    assert_close(gradient(batches, config), expected_gradient(mini_batch(), config))


def test_weights_are_zero_outside_the_mask_and_one_value_inside():
    (batch,) = cut(mini_batch(), 0, 1, 7)
    (weights,) = loss_weights([batch], SEQ_MEAN, None)
    assert weights.dtype == torch.float32
    assert weights.shape == batch.mask.shape
    assert not weights[~batch.mask].any()
    assert set(weights[batch.mask].tolist()) == {torch.tensor(1 / (6 * 13)).item()}


def test_many_long_responses_are_counted_exactly():
    batch = collate([make_sample(1, length) for length in [1021] * 97], Cut(tuple(range(97)), 97, 1024), 0)
    (weights,) = loss_weights([batch], TOKEN_MEAN, None)
    assert weights.max().item() == torch.tensor(1 / (97 * 1021)).item()


def on_two_ranks(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The summed gradients of every layout of two ranks, and the errors of batches without a token."""
    group = dist.group.WORLD
    one_token = [make_sample(8, 1, first_id=50), make_sample(3, 0)]
    layouts = {}
    for config in CONFIGS:
        for micro in (1, 2, 3):
            layouts[f"dp {config.mode} {micro}"] = gradient(cut(mini_batch(), rank, 2, micro), config, group)
            whole = cut(mini_batch(), 0, 1, micro)
            slices = [context_share(batch, rank, 2) for batch in whole]
            layouts[f"cp {config.mode} {micro}"] = gradient(slices, config, group)
        for budget in (16, 40, 400):
            layouts[f"dp {config.mode} packed {budget}"] = gradient(
                packed(mini_batch(), rank, 2, budget, (0, 1)), config, group
            )
            layouts[f"cp {config.mode} packed {budget}"] = gradient(
                packed(mini_batch(), 0, 1, budget, (rank, 2)), config, group
            )
        # One token in all: one rank has nothing.
        layouts[f"dp one {config.mode}"] = gradient(cut(one_token, rank, 2, 1), config, group)
        slices = [context_share(batch, rank, 2) for batch in cut(one_token, 0, 1, 2)]
        layouts[f"cp one {config.mode}"] = gradient(slices, config, group)
    for summed in layouts.values():
        dist.all_reduce(summed)
    with pytest.raises(RolloutError, match="no token to train on"):
        loss_weights(cut([make_sample(3, 0)], rank, 2, 2), TOKEN_MEAN, group)
    # The ranks do not hold the halves of one response but twice the first half.
    with pytest.raises(RuntimeError, match="no whole number"):
        loss_weights([context_share(batch, 0, 2) for batch in cut([make_sample(3, 7)], 0, 1, 1)], SEQ_MEAN, group)
    return layouts


def test_gradient_does_not_depend_on_data_or_context_parallel_size():
    """Megatron-LM PR #7513: context-parallel denominators halved the gradient; verl PR #5867: so did the cut."""
    one_token = [make_sample(8, 1, first_id=50), make_sample(3, 0)]
    expected = {config.mode: expected_gradient(mini_batch(), config) for config in CONFIGS}
    expected |= {f"one {config.mode}": expected_gradient(one_token, config) for config in CONFIGS}
    for layouts in run_ranks(2, on_two_ranks):
        assert len(layouts) == 28
        for name, actual in layouts.items():
            kind = f"one {name.split()[-1]}" if " one " in name else name.split()[1]
            assert_close(actual, expected[kind])


def test_no_token_anywhere_is_an_error_in_words():
    with pytest.raises(RolloutError, match="no token to train on: every response came back empty"):
        loss_weights([collate([make_sample(3, 0)], Cut((0,), 2, 8), 0)], SEQ_MEAN, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LossNormalizationConfig("seq-mean"), "got 'seq-mean'"),
        (LossNormalizationConfig("seq-mean-token-sum-norm", None), "needs a horizon.*got None"),
        (LossNormalizationConfig("seq-mean-token-sum-norm", 0), "needs a horizon.*got 0"),
    ],
)
def test_impossible_configurations_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        loss_weights([collate([make_sample()], Cut((0,), 1, 8), 0)], config, None)
