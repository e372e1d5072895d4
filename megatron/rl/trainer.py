"""The loop: rollouts, rewards, advantages, optimizer steps, weight hand-over, evaluation. Read top to bottom."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.rl.behaviour_check import check_behaviour_policy
from megatron.rl.collector import Collector
from megatron.rl.config import RunConfig
from megatron.rl.data import (
    MicroBatcher,
    PromptSampler,
    group_advantages,
    loss_weights,
    trained_samples,
)
from megatron.rl.evaluation import Evaluation, evaluate
from megatron.rl.policy.learner import Learner
from megatron.rl.reporting import Reporter
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.preflight import MismatchReport
from megatron.rl.types import Completion, Prompt, RewardResult, Sample

_PROBE_PROMPTS = 4


@dataclass(frozen=True)
class Parts:
    """What the loop puts together, each built and tested on its own."""

    learner: Learner
    engine: RolloutEngine
    collector: Collector
    prompts: PromptSampler
    preflight_prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    reporter: Reporter
    export_weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    save_checkpoint: Callable[[], None]
    export_folder: Callable[[], None]
    saved: Sequence[tuple[str, str]]  # (what, where) of the two above
    groups: Any  # Megatron's ProcessGroupCollection
    micro_batches: MicroBatcher
    stop: Callable[[int], str | None]  # by optimizer steps finished: why the run should end there


@dataclass
class Progress:
    """Where the run is."""

    step: int = 0  # rollout batches finished; also the version of the policy
    iteration: int = 0  # optimizer steps finished
    saved: int | None = None  # optimizer steps behind the newest checkpoint in ``--save``
    evaluations: list[tuple[int, Evaluation]] = field(default_factory=list)


class Trainer:
    """Runs the whole training. Every rank has one; all methods are collective."""

    def __init__(self, run: RunConfig, parts: Parts, progress: Progress) -> None:
        self._run = run
        self._parts = parts
        self._progress = progress
        self._report = parts.reporter

    def train(self) -> None:
        """From the preflight to the last evaluation and what the run leaves behind."""
        self._hand_over_weights()
        self._preflight()
        self._evaluate()
        while self._progress.iteration < self._run.trainer.train_iters:
            self._step()
            if self._stops_early():
                return
            if self._is_due(self._run.trainer.eval_interval):
                self._evaluate()
        self._evaluate()
        with self._report.phase("save"):
            self._save()
            self._parts.export_folder()
        self._report.finish(self._progress.evaluations, self._parts.saved)

    def _stops_early(self) -> bool:
        """Saves and says so where the run is to end before its last step. It can go on from there."""
        if self._progress.iteration == self._run.trainer.train_iters:
            return False
        reason = self._parts.stop(self._progress.iteration)
        if reason is None:
            return False
        with self._report.phase("save"):
            self._save()
        self._report.stopped(reason)
        return True

    def _step(self) -> None:
        """One rollout batch: sample, score, take the optimizer steps, hand the new weights to the engine."""
        trainer = self._run.trainer
        samples = self._rollout(f"step{self._progress.step + 1}")
        self._report.rollout(samples)
        for epoch in range(trainer.iterations):
            for start in range(0, len(samples), trainer.mini_batch_size):
                self._update(samples[start : start + trainer.mini_batch_size], first=epoch == 0 and start == 0)
        self._progress.step += 1
        self._hand_over_weights()
        self._probe()
        self._report.step(self._progress.step, self._progress.iteration)
        if self._is_due(trainer.save_interval):
            with self._report.phase("save"):
                self._save()

    def _rollout(self, label: str) -> list[Sample]:
        """The step's responses with rewards and group-relative advantages; equal on all ranks."""
        trainer = self._run.trainer
        prompts = self._parts.prompts.next_batch(trainer.prompts_per_step)
        with self._report.phase("rollout"):
            pending = self._parts.collector.sample(prompts, trainer.group_size, self._run.sampling, label)
        with self._report.phase("reward"):
            scored = self._parts.collector.scored(pending)
        advantages = group_advantages([result for _, _, result in scored], trainer.group_size, self._run.advantage)
        trained = trained_samples(advantages, trainer.group_size, self._run.advantage)
        return [
            Sample(*triple, advantage, is_trained)
            for triple, advantage, is_trained in zip(scored, advantages, trained, strict=True)
        ]

    def _update(self, samples: Sequence[Sample], *, first: bool) -> None:
        """One optimizer step on a mini-batch. mu stays the engine's own log-probability through all of them."""
        # Where all of a mini-batch is filtered out, it is trained on as it is: its objective has no gradient.
        trained = [sample for sample in samples if sample.trained] or samples
        with self._report.phase("train"):
            batches = self._parts.micro_batches(trained)
            weights = loss_weights(batches, self._run.normalization, self._parts.groups.dp_cp)
            result = self._parts.learner.update(batches, weights, len(samples))
        self._progress.iteration += 1
        # Before the first optimizer step pi and mu are one policy: what differs is engine against trainer.
        self._report.update(result, batches, first=first)

    def _hand_over_weights(self) -> None:
        with self._report.phase("sync"):
            self._parts.engine.update_weights(self._parts.export_weights(), version=self._progress.step)

    def _preflight(self) -> None:
        """Engine and trainer must agree on the same tokens' log-probabilities before anything is trained."""
        report = self._compare_with_engine(self._parts.preflight_prompts, "preflight")
        self._report.preflight(self._progress.step, self._progress.iteration, report)

    def _probe(self) -> None:
        """The same on few tokens after weights went to another process: did they arrive, and is the cache flushed?"""
        if not self._parts.engine.holds_weights_here:
            prompts = self._parts.preflight_prompts[:_PROBE_PROMPTS]
            self._report.probe(self._compare_with_engine(prompts, f"probe{self._progress.step}"))

    def _compare_with_engine(self, prompts: Sequence[Prompt], label: str) -> MismatchReport:
        with self._report.phase("logprob"):
            collector = self._parts.collector
            scored = collector.scored(collector.sample(prompts, 2, self._run.sampling, label))
            samples = [_without_advantage(*triple) for triple in scored]
            batches = self._parts.micro_batches(samples)
            return check_behaviour_policy(self._parts.learner, batches, self._run, self._parts.groups)

    def _evaluate(self) -> None:
        """Held-out problems, sampled as in training with the engine's current weights; once for each of them."""
        evaluated = [step for step, _ in self._progress.evaluations]
        if not self._parts.eval_prompts or self._progress.step in evaluated:
            return
        with self._report.phase("eval"):
            evaluation = evaluate(
                self._parts.collector,
                self._parts.eval_prompts,
                self._run.trainer.eval_samples,
                self._run.sampling,
                f"eval{self._progress.step}",
            )
        self._progress.evaluations.append((self._progress.step, evaluation))
        self._report.evaluation(self._progress.step, self._progress.iteration, evaluation)

    def _save(self) -> None:
        if self._progress.saved != self._progress.iteration:
            self._parts.save_checkpoint()
            self._progress.saved = self._progress.iteration

    def _is_due(self, interval: int) -> bool:
        """Whether something done every ``interval`` optimizer steps is to be done now."""
        return self._progress.iteration % interval == 0


def _without_advantage(prompt: Prompt, completion: Completion, reward: RewardResult) -> Sample:
    return Sample(prompt, completion, reward, advantage=0.0)
