"""Runs the check of the rollout engine against the trainer on a few real prompts, over all ranks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
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
    """Engine's and trainer's log-probabilities of all responses, token by token in order, on every rank."""
    requests = learner.logprobs(batches, temperature=temperature)
    mine: list[_Token] = []
    if learner.is_last_stage:
        for batch, request in zip(batches, requests, strict=True):
            mine += _tokens(batch, request.tokens["logprobs"])
    # Data- and context-parallel ranks have different tokens; under context parallelism also of one response.
    shares: list[list[_Token]] = [[] for _ in range(groups.dp_cp.size())]
    dist.all_gather_object(shares, mine, group=groups.dp_cp)
    everything = [sorted(token for share in shares for token in share)]
    if groups.pp.size() > 1:
        dist.broadcast_object_list(everything, group=groups.pp, group_src=groups.pp.size() - 1)
    engine: dict[int, list[float]] = defaultdict(list)
    trainer: dict[int, list[float]] = defaultdict(list)
    for place, _, log_mu, log_pi in everything[0]:
        engine[place].append(log_mu)
        trainer[place].append(log_pi)
    return list(engine.values()), list(trainer.values())


_Token = tuple[int, int, float, float]  # place of the response in the mini-batch, position, log mu, log pi


def _tokens(batch: TokenBatch, logprobs: torch.Tensor) -> list[_Token]:
    """This rank's sampled tokens of a micro-batch."""
    places = [batch.places[number] for number in batch.sequence_ids[batch.mask].tolist()]
    values = (batch.position_ids, batch.behavior_logprobs, logprobs)
    return list(zip(places, *(value[batch.mask].tolist() for value in values), strict=True))
