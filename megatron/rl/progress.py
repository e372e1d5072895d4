"""What a person sees while a run goes on: one line a step, and on a terminal a live bar below."""

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

Record = Mapping[str, float]

# (metric, label, format) of a step's line, in order.
_STEP_COLUMNS = (
    ("reward/mean", "reward", ".3f"),
    ("response/length", "length", ".1f"),
    ("policy/entropy", "entropy", ".3f"),
    ("tv/mean", "tv", ".1e"),
    ("train/grad_norm", "grad", ".3g"),
    ("speed/tokens_per_second", "tok/s", ",.0f"),
)
_EVAL_COLUMNS = (
    ("eval/reward", "reward", ".3f"),
    ("eval/pass_at_k", "pass@k", ".3f"),
    ("eval/response_length", "length", ".1f"),
)
# Counts that a healthy run has none of: they are shown where they are not zero.
_STEP_TROUBLES = (
    ("ratio/nonfinite", "ratios not finite"),
    ("policy/nonfinite", "tokens not finite"),
    ("train/skipped_updates", "updates skipped"),
    ("reward/timeouts", "rewards timed out"),
    ("reward/errors", "rewards failed"),
    ("response/aborted", "responses aborted"),
)
_EVAL_TROUBLES = (("eval/timeouts", "rewards timed out"), ("eval/errors", "rewards failed"))


class TimeLeft:
    """How long a run still takes: medians of the latest steps and evaluations, so one slow step moves nothing."""

    _STEPS, _EVALUATIONS = 15, 5

    def __init__(self, steps: int, eval_interval: int, start_step: int = 0) -> None:
        """``steps`` in all, of which ``start_step`` are behind; evaluations after every ``eval_interval``-th step
        (0: none) and after the last."""
        self._total = steps
        self._interval = eval_interval
        self._step = start_step
        self._evaluated = start_step
        self._step_seconds: deque[float] = deque(maxlen=self._STEPS)
        self._eval_seconds: deque[float] = deque(maxlen=self._EVALUATIONS)

    def step(self, step: int, seconds: float) -> None:
        """Step number ``step`` took ``seconds``."""
        self._step = step
        self._step_seconds.append(seconds)

    def evaluation(self, step: int, seconds: float) -> None:
        """The evaluation after step number ``step`` took ``seconds``."""
        self._evaluated = step
        self._eval_seconds.append(seconds)

    def seconds(self) -> float | None:
        """Seconds to the end of the run; None before the first step. Evaluations count once one has been timed."""
        if self._step >= self._total and self._remaining_evaluations() == 0:
            return 0.0
        if not self._step_seconds:
            return None
        left = (self._total - self._step) * statistics.median(self._step_seconds)
        if self._eval_seconds:
            left += self._remaining_evaluations() * statistics.median(self._eval_seconds)
        return left

    def _remaining_evaluations(self) -> int:
        ahead = int(self._evaluated < self._total)  # the last one
        if self._interval > 0:
            ahead += max((self._total - 1) // self._interval - self._evaluated // self._interval, 0)
        return ahead


def format_seconds(seconds: float | None) -> str:
    """Such as 7s, 2m05s, 3h07m, 2d04h; ``?`` for None."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def step_line(record: Record, steps: int, left: float | None) -> str:
    """One plain line of a step's record: what of it is recorded, and the time left in seconds."""
    parts = _columns(record, _STEP_COLUMNS) + _troubles(record, _STEP_TROUBLES) + [f"{format_seconds(left)} left"]
    return " | ".join([f"step {int(record['step']):>{len(str(steps))}}/{steps}", *parts])


def eval_line(record: Record, steps: int) -> str:
    """One plain line of an evaluation's record."""
    parts = _columns(record, _EVAL_COLUMNS) + _troubles(record, _EVAL_TROUBLES)
    if "time/eval" in record:
        parts.append(f"took {format_seconds(record['time/eval'])}")
    return " | ".join([f"eval {int(record['step']):>{len(str(steps))}}/{steps}", *parts])


def _columns(record: Record, columns: Sequence[tuple[str, str, str]]) -> list[str]:
    return [f"{label} {record[name]:{form}}" for name, label, form in columns if name in record]


def _troubles(record: Record, troubles: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{label}: {int(record[name])}" for name, label in troubles if record.get(name, 0) > 0]


def banner(rows: Sequence[tuple[str, str]], *, title: str = "", stream: TextIO | None = None) -> None:
    """Prints what a run is made of, one (name, value) a line; in colour on a terminal."""
    stream = stream or sys.stdout
    if not _is_terminal(stream):
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"  {name:<{width}}  {value}" for name, value in rows]
        print("\n".join([title, *lines] if title else lines), file=stream, flush=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(value))
    console = Console(file=stream, highlight=False)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class ProgressDisplay:
    """Shows a run's records: one plain line for each step and evaluation, and on a terminal a live bar below them with
    step, reward, time left and phase. Only rank 0 shows anything.

    Use as a context manager around the whole run.
    """

    def __init__(
        self,
        steps: int,
        *,
        rank: int,
        eval_interval: int,
        start_step: int = 0,
        every_s: float = 0.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            steps: rollout batches of the whole run, of which ``start_step`` are behind (a resumed run).
            rank: global rank of this process.
            eval_interval: steps between evaluations; 0 for one after the last step only.
            every_s: least seconds between two lines of steps; 0 shows every step. The first and the last step,
                evaluations, and steps with a trouble are always shown.
            stream: standard output if None.
        """
        self._steps = steps
        self._shows = rank == 0
        self._stream = stream or sys.stdout
        self._every_s = every_s
        self._clock = clock
        self._last_line: float | None = None
        self._time_left = TimeLeft(steps, eval_interval, start_step)
        self._rewards: dict[str, str] = {}  # the latest of training and evaluation, as the bar shows them
        self._bar: Progress | None = None
        if self._shows and _is_terminal(self._stream):
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[rewards]}"),
                TextColumn("[cyan]{task.fields[left]}"),
                TextColumn("[dim]{task.fields[phase]:<7}"),
                console=Console(file=self._stream, highlight=False),
            )
            self._task = self._bar.add_task("", total=steps, completed=start_step, rewards="", left="", phase="start")

    def __enter__(self) -> "ProgressDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._task, phase="done" if error is None else "failed")
            self._bar.stop()

    def phase(self, name: str) -> None:
        """The run is now in this phase; seen on a terminal only."""
        if self._bar is not None:
            self._bar.update(self._task, phase=name)

    def note(self, text: str) -> None:
        """Prints a line of text, above the bar where there is one."""
        if not self._shows:
            return
        if self._bar is not None:
            self._bar.console.print(Text(text), soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def show(self, record: Record) -> None:
        """Shows a record of :class:`megatron.rl.run_log.RunLog`: of a step (it has ``time/step``), an evaluation (it
        has ``time/eval``), or both."""
        if not self._shows:
            return
        step = int(record["step"])
        if "time/step" in record:
            self._time_left.step(step, record["time/step"])
        if "time/eval" in record:
            self._time_left.evaluation(step, record["time/eval"])
        if self._bar is not None:
            self._update_bar(self._bar, record)
        if "time/step" in record and self._is_line_due(record):
            self.note(step_line(record, self._steps, self._time_left.seconds()))
        if "time/eval" in record:
            self.note(eval_line(record, self._steps))

    def _is_line_due(self, record: Record) -> bool:
        if _troubles(record, _STEP_TROUBLES):
            return True
        now = self._clock()
        first_or_last = self._last_line is None or int(record["step"]) == self._steps
        if first_or_last or now - (self._last_line or 0.0) >= self._every_s:
            self._last_line = now
            return True
        return False

    def _update_bar(self, bar: Progress, record: Record) -> None:
        for name, label in (("reward/mean", "reward"), ("eval/reward", "eval")):
            if name in record:
                self._rewards[label] = f"{label} {record[name]:.3f}"
        bar.update(
            self._task,
            completed=int(record["step"]),
            rewards="  ".join(self._rewards.values()),
            left=f"{format_seconds(self._time_left.seconds())} left",
        )
