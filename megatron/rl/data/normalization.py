"""How the objectives of single tokens become the one number that is maximised."""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup, all_reduce

from megatron.rl.config import LossNormalizationConfig
from megatron.rl.data.batching import TokenBatch
from megatron.rl.errors import ConfigError, RolloutError


def loss_weights(
    batches: Sequence[TokenBatch], config: LossNormalizationConfig, group: ProcessGroup | None
) -> list[torch.Tensor]:
    """One weight for each token of this rank's micro-batches, float32 [batch, sequence], zero outside the mask.

    The objective is the sum of weight times J over all tokens of all micro-batches of all ranks of ``group``;
    it does not depend on how the mini-batch is cut into micro-batches or spread over ranks. With T sampled
    tokens and N responses in the whole mini-batch (a response without any token is none):

    * ``token-mean``: 1 / T;
    * ``seq-mean-token-sum-norm``: 1 / (N horizon), the mean over responses of the token sum over a fixed horizon.

    Args:
        batches: all micro-batches of one optimizer step that this rank computes. Under context parallelism
            they hold this rank's positions only, with ``response_tokens`` of the whole responses.
        config: mode and horizon.
        group: the data-parallel group with context parallelism; None for a single process.

    Collective over ``group``. Raises on all its ranks alike:
        ConfigError: an unknown mode, or no positive horizon for ``seq-mean-token-sum-norm``.
        RolloutError: no rank has a token to train on.
        RuntimeError: the ranks' positions of a response do not add up to the response.
    """
    _check(config)
    tokens, responses = _global_counts(batches, group)
    if tokens == 0:
        raise RolloutError(
            "the mini-batch has no token to train on: every response came back empty; "
            "look at the rollout engine's limit of new tokens and its stop conditions"
        )
    if config.mode == "token-mean":
        weight = 1.0 / tokens
    else:
        assert config.horizon is not None
        weight = 1.0 / (responses * config.horizon)
    return [batch.mask.to(torch.float32) * weight for batch in batches]


def _check(config: LossNormalizationConfig) -> None:
    if config.mode == "token-mean":
        return
    if config.mode != "seq-mean-token-sum-norm":
        raise ConfigError(
            f"unknown loss normalisation; choose token-mean or seq-mean-token-sum-norm (got {config.mode!r})"
        )
    if config.horizon is None or config.horizon < 1:
        raise ConfigError(
            f"seq-mean-token-sum-norm needs a horizon of at least 1 token, as a rule the longest response allowed "
            f"(got {config.horizon})"
        )


def _global_counts(batches: Sequence[TokenBatch], group: ProcessGroup | None) -> tuple[int, int]:
    """Sampled tokens and responses of the whole mini-batch."""
    counts = torch.zeros(2, dtype=torch.float64, device=batches[0].mask.device)
    for batch in batches:
        tokens = torch.bincount(batch.sequence_ids[batch.mask], minlength=len(batch.places))
        counts[0] += tokens.sum()
        # A response spread over context-parallel ranks counts on each with the share of tokens that it has there.
        counts[1] += (tokens.double() / batch.response_tokens.clamp(min=1)).sum()
    if group is not None:
        all_reduce(counts, group=group)
    tokens_in_all, responses = counts.tolist()
    if abs(responses - round(responses)) > 1e-6:
        raise RuntimeError(f"masks of all ranks add up to {responses} responses, which is no whole number")
    return round(tokens_in_all), round(responses)
