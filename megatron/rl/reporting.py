"""Turns what happens in the loop into records, lines, plots and a closing word."""

import contextlib
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup

from megatron.rl.config import RunConfig
from megatron.rl.data import TokenBatch, count_groups
from megatron.rl.evaluation import Evaluation
from megatron.rl.metrics import PhaseTimer, TokenStatistics
from megatron.rl.plots import plot_run
from megatron.rl.policy.learner import UpdateResult
from megatron.rl.progress import ProgressDisplay, banner
from megatron.rl.rollout.preflight import MismatchReport
from megatron.rl.run_log import RunLog, TokenSampleWriter
from megatron.rl.types import Sample


class Reporter:
    """Collects a step's numbers and writes them. Every rank has one; rank 0 writes and shows.

    Args:
        run: the resolved configuration.
        groups: Megatron's process groups.
        device: of the per-token values.
        steps: rollout batches of the whole run.
        start_step: rollout batches behind, in a resumed run; None for a new one.
    """

    def __init__(self, run: RunConfig, groups: Any, device: torch.device, steps: int, start_step: int | None) -> None:
        self._run = run
        self._groups = groups
        self._device = device
        self._rank = torch.distributed.get_rank()
        trainer = run.trainer
        interval = trainer.eval_interval // trainer.iterations_per_step
        self._display = ProgressDisplay(steps, rank=self._rank, eval_interval=interval, start_step=start_step or 0)
        self._log = RunLog(
            trainer.run_dir,
            rank=self._rank,
            tensorboard_dir=trainer.tensorboard_dir,
            resume_step=start_step,
            echo=self._display.show,
        )
        self._timer = PhaseTimer(on_enter=self._display.phase)
        self._token_sample = None
        if groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == 0 and groups.dp_cp.rank() == 0:
            self._token_sample = TokenSampleWriter(trainer.run_dir, seed=trainer.seed, resume_step=start_step)
        self._stack = contextlib.ExitStack()
        self._record: dict[str, float]
        self._updates: list[UpdateResult]
        self._tokens: TokenStatistics
        self._first_statistics: dict[str, float]
        self._first_tokens: list[tuple[torch.Tensor, torch.Tensor]]
        self._sampled_tokens: int
        self._micro_batches: int
        self._positions: torch.Tensor
        self._begin_step()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._display)
        self._stack.enter_context(self._log)
        return self

    def __exit__(self, *exception: Any) -> bool | None:
        return self._stack.__exit__(*exception)

    def start(self, rows: Sequence[tuple[str, str]], notes: Sequence[str]) -> None:
        """The table of what this run is made of, and what was chosen by itself."""
        if self._rank == 0:
            banner(rows, title="DRPO on Megatron-Core")
        for note in notes:
            self._display.note(f"note: {note}")

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of the step; see :data:`megatron.rl.run_log.PHASES`."""
        return self._timer.phase(name)

    def preflight(self, step: int, iteration: int, report: MismatchReport) -> None:
        """What engine and trainer make of the same tokens before training."""
        self._display.note(f"engine and trainer agree: {report}")
        self._log.write({"step": step, "iteration": iteration, **_mismatch(report)})
        self._timer.take()

    def probe(self, report: MismatchReport) -> None:
        """The same on few tokens after a step's weights were handed to servers."""
        self._record["mismatch/after_sync"] = report.mean_difference

    def rollout(self, samples: Sequence[Sample]) -> None:
        """The step's responses."""
        trainer = self._run.trainer
        results = [sample.reward for sample in samples]
        counts = count_groups(results, trainer.group_size, self._run.advantage)
        scores = [result.score for result in results]
        lengths = [len(sample.completion.token_ids) for sample in samples]
        reasons = [sample.completion.finish_reason for sample in samples]
        self._record |= {
            "reward/mean": statistics.fmean(scores),
            "reward/std": statistics.pstdev(scores),
            "reward/unreadable": sum(result.status == "unreadable" for result in results),
            "reward/timeouts": sum(result.status == "timeout" for result in results),
            "reward/errors": sum(result.status == "error" for result in results),
            "reward/flat_groups": counts.without_signal / counts.groups,
            "reward/incomplete_groups": counts.incomplete / counts.groups,
            "response/length": statistics.fmean(lengths),
            "response/length_max": max(lengths),
            "response/truncated": reasons.count("length") / len(reasons),
            "response/aborted": reasons.count("abort"),
        }
        self._sampled_tokens = sum(lengths)

    def update(self, result: UpdateResult, batches: Sequence[TokenBatch], *, first: bool) -> None:
        """One optimizer step. In a step's ``first`` one pi and mu are one policy, so they differ by mismatch only."""
        self._updates.append(result)
        self._micro_batches += len(batches)
        for batch, request in zip(batches, result.requests, strict=True):
            self._positions += torch.tensor([batch.tokens.numel(), int(batch.is_padding.sum())])
            if not request.tokens:  # another pipeline stage than the last has none
                continue
            self._tokens.add({**request.tokens, "behavior_logprobs": batch.behavior_logprobs}, batch.mask)
            if first:
                self._first_tokens.append((request.tokens["logprobs"][batch.mask], batch.behavior_logprobs[batch.mask]))
        if first:
            self._first_statistics = self._reduce()

    def step(self, step: int, iteration: int) -> None:
        """Writes the step's record."""
        seconds, phases = self._timer.take()
        found = self._reduce()
        found |= {name: value for name, value in self._first_statistics.items() if name.startswith("mismatch/")}
        self._log.write(
            {
                "step": step,
                "iteration": iteration,
                **self._record,
                **found,
                "train/micro_batches": self._micro_batches,
                "train/padding": self._padding(),
                "train/loss": statistics.fmean(update.loss for update in self._updates),
                **self._gradient_norm(),
                "train/learning_rate": self._updates[-1].learning_rate,
                "train/skipped_updates": sum(not update.applied for update in self._updates),
                "speed/tokens_per_second": self._sampled_tokens / seconds,
                "time/step": seconds,
                **phases,
            }
        )
        if self._token_sample is not None and self._first_tokens:
            logp, logmu = (torch.cat(parts) for parts in zip(*self._first_tokens, strict=True))
            self._token_sample.add(step, logp, logmu)
        self._begin_step()

    def evaluation(self, step: int, iteration: int, evaluation: Evaluation) -> None:
        """Writes an evaluation's record."""
        _, phases = self._timer.take()
        self._log.write(
            {
                "step": step,
                "iteration": iteration,
                "eval/reward": evaluation.reward,
                "eval/pass_at_k": evaluation.pass_at_k,
                "eval/response_length": evaluation.response_length,
                "eval/unreadable": evaluation.unreadable,
                "eval/timeouts": evaluation.timeouts,
                "eval/errors": evaluation.errors,
                **phases,
            }
        )

    def stopped(self, reason: str) -> None:
        """The run ends before its last step; its checkpoint is saved."""
        self._log.close()
        self._display.note(f"stopped: {reason}; the checkpoint is saved, and --load goes on from it")

    def finish(self, evaluations: Sequence[tuple[int, Evaluation]], saved: Sequence[tuple[str, str]]) -> None:
        """Plots, what was saved where, and the reward of the first and of the last evaluation."""
        self._log.close()
        if self._rank != 0:
            return
        plots = plot_run(self._run.trainer.run_dir)
        lines = list(plots.left_out)
        lines += [f"{name}: {path}" for name, path in [*saved, ("plots", str(plots.written[0].parent))]]
        for name, at in (("first", 0), ("last", -1)):
            if evaluations:
                step, found = evaluations[at]
                lines.append(
                    f"{name} evaluation (step {step}): reward {found.reward:.3f}, pass@{found.samples} "
                    f"{found.pass_at_k:.3f} on {found.prompts} held-out problems"
                )
        if evaluations:
            lines.append(f"reward gained: {evaluations[-1][1].reward - evaluations[0][1].reward:+.3f}")
        for line in lines:
            self._display.note(line)

    def _begin_step(self) -> None:
        self._record, self._updates = {}, []
        self._tokens = TokenStatistics(self._device)
        self._first_statistics, self._first_tokens = {}, []
        self._sampled_tokens = self._micro_batches = 0
        self._positions = torch.zeros(2, dtype=torch.int64)  # of this rank's micro-batches: in all, and of padding

    def _gradient_norm(self) -> dict[str, float]:
        norms = [update.grad_norm for update in self._updates if update.grad_norm is not None]
        return {"train/grad_norm": statistics.fmean(norms)} if norms else {}

    def _padding(self) -> float:
        positions = self._positions.to(self._device)
        torch.distributed.all_reduce(positions, group=self._groups.dp_cp)
        total, padding = positions.tolist()
        return padding / total

    def _reduce(self) -> dict[str, float]:
        pipeline: ProcessGroup | None = self._groups.pp if self._groups.pp.size() > 1 else None
        return self._tokens.reduce(self._groups.dp_cp, pipeline)


def _mismatch(report: MismatchReport) -> dict[str, float]:
    return {"mismatch/logprob": report.mean_difference, "mismatch/tv": report.mean_tv}
