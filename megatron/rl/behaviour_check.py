"""Runs the check of the rollout engine against the trainer on a few real prompts, over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.rl.config import RunConfig
from megatron.rl.data import TokenBatch
from megatron.rl.policy.learner import Learner
from megatron.rl.rollout.preflight import MismatchReport, compare, refuse_mismatch

Rows = list[list[float]]


def check_behaviour_policy(
    learner: Learner, batches: Sequence[TokenBatch], run: RunConfig, groups: Any
) -> MismatchReport:
    """Compares the log-probabilities in ``batches``, the engine's, with the trainer's own. Collective.

    Raises :class:`megatron.rl.errors.RolloutError` on all ranks where they disagree beyond what the precision explains.
    """
    engine, trainer = _log_probabilities(learner, batches, groups, temperature=None)
    report = compare(engine, trainer, _precision(run))
    alternatives = {}
    if run.sampling.temperature != 1.0:
        _, plain = _log_probabilities(learner, batches, groups, temperature=1.0)
        advice = f"the engine's log-probabilities ignore --rl-default-temperature {run.sampling.temperature}"
        alternatives[advice] = plain
    refuse_mismatch(report, engine, trainer, alternatives)
    return report


def _precision(run: RunConfig) -> str:
    return "fp8" if run.fp8_format else "bf16" if run.bf16 else "float32"


def _log_probabilities(
    learner: Learner, batches: Sequence[TokenBatch], groups: Any, temperature: float | None
) -> tuple[Rows, Rows]:
    """Engine's and trainer's log-probabilities of all data-parallel ranks, on every rank."""
    requests = learner.logprobs(batches, temperature=temperature)
    mine: tuple[Rows, Rows] = ([], [])
    if learner.is_last_stage:
        for batch, request in zip(batches, requests, strict=True):
            for row, mask in enumerate(batch.mask):
                if mask.any():
                    mine[0].append(batch.behavior_logprobs[row][mask].tolist())
                    mine[1].append(request.tokens["logprobs"][row][mask].tolist())
    shares: list[Any] = [None] * groups.dp.size()
    dist.all_gather_object(shares, mine, group=groups.dp)
    everything = [([row for engine, _ in shares for row in engine], [row for _, trainer in shares for row in trainer])]
    if groups.pp.size() > 1:
        dist.broadcast_object_list(everything, group=groups.pp, group_src=groups.pp.size() - 1)
    return everything[0]
