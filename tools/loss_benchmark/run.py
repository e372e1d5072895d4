"""Measures all paths, in turn."""

import functools
import random
import re
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from loss_benchmark.inputs import Inputs, exact_answer, make_inputs
from loss_benchmark.measure import Errors, Progress, errors, extra_bytes, floor_call, rounding, seconds
from loss_benchmark.paths import Forward, LossPath, MissingPeer, OwnLoss, Place, answer

_ABSOLUTE = re.compile(r"(?<![\w.])/(?:[^\s/'\":]+/)+")  # the folders of a path
_LONGEST_REASON = 300  # characters
FLOOR = "floor"

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What is measured, and how often."""

    tokens: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    device: torch.device
    rounds: int
    memory_tokens: tuple[int, ...]
    error_vocab: int
    seed: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass
class Record:
    """What became of one path."""

    path: LossPath
    status: str = "measured"  # or "missing", "error"
    reason: str = ""
    seconds: list[float] = field(default_factory=list)  # one a round
    extra_bytes: dict[int, int] = field(default_factory=dict)  # by number of tokens
    largest_chunk: dict[int, int] = field(default_factory=dict)  # ours: tokens in a chunk, by number of tokens
    errors: Errors | None = None

    @property
    def median(self) -> float | None:
        """Seconds."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True)
class Outcome:
    """One run's figures."""

    records: list[Record]  # ours first
    floor_seconds: list[float]
    rounding: Errors

    @property
    def floor(self) -> float:
        """Seconds, the median."""
        return statistics.median(self.floor_seconds)

    @property
    def failed(self) -> bool:
        return any(record.status == "error" for record in self.records)


def run(setting: Setting, paths: Sequence[LossPath]) -> Outcome:
    """Measures times in alternation, then each path's error and memory alone. ``paths`` begin with ours.

    A path that raises is put out of the run, with its reason in its record.
    """
    with _own_group(setting.device) as group:
        bench = _Bench(setting, paths, Place(setting.device, setting.dtype, group))
        floor_seconds = bench.times()
        floor_errors = bench.errors()
        bench.memory()
        bench.progress.close()
    return Outcome(bench.records, floor_seconds, floor_errors)


@contextmanager
def _own_group(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this rank alone, for peers that want one."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None  # made just now
        yield group
    finally:
        # A path may have set up megatron-core's own groups; what was never imported has none.
        if "megatron.core.parallel_state" in sys.modules:
            sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
        dist.destroy_process_group()


class _Bench:
    def __init__(self, setting: Setting, paths: Sequence[LossPath], place: Place) -> None:
        self.setting = setting
        self.records = [Record(path) for path in paths]
        self.progress = Progress()
        self._place = place
        self._forwards: dict[str, Forward] = {}

    def times(self) -> list[float]:
        """Warms all up, then measures round by round in a new order each; returns the floor's seconds."""
        setting = self.setting
        inputs = self._inputs(setting.tokens, setting.vocab)
        self.progress.begin((len(self.records) + 1) * setting.tokens)
        floor = floor_call(inputs)
        floor()
        self.progress.done(setting.tokens, "warm-up", FLOOR)
        for record in self.records:
            self._attempt(record, lambda forward: answer(forward, inputs))
            self.progress.done(setting.tokens, "warm-up", record.path.name)
        calls = setting.rounds * (len(self._live()) + 1)
        pending = len(self._live()) * (setting.tokens + sum(setting.memory_tokens))  # errors and memory, later
        self.progress.begin(calls * setting.tokens + pending)
        floor_seconds: list[float] = []
        order = random.Random(setting.seed)
        for turn in range(1, setting.rounds + 1):
            turns: list[Record | None] = [None, *self._live()]
            order.shuffle(turns)
            for entry in turns:
                if entry is None:
                    floor_seconds.append(seconds(floor, setting.device))
                else:
                    self._attempt(entry, functools.partial(self._time, entry, inputs))
                name = FLOOR if entry is None else entry.path.name
                self.progress.done(setting.tokens, f"round {turn}/{setting.rounds}", name)
        return floor_seconds

    def errors(self) -> Errors:
        """Measures every path's errors; returns those of exact gradients rounded to the inputs' type."""
        setting = self.setting
        inputs = self._inputs(setting.tokens, setting.error_vocab)
        exact = exact_answer(inputs)
        for record in self._live():
            record.errors = self._attempt(record, lambda forward: errors(answer(forward, inputs), exact))
            self.progress.done(setting.tokens, "errors", record.path.name)
        return rounding(exact, setting.dtype)

    def memory(self) -> None:
        """Measures every path's memory, alone."""
        for tokens in self.setting.memory_tokens:
            inputs = self._inputs(tokens, self.setting.vocab)
            for record in self._live():
                self._attempt(record, functools.partial(self._memory, record, inputs))
                self.progress.done(tokens, f"memory at {tokens} tokens", record.path.name)

    def _live(self) -> list[Record]:
        return [record for record in self.records if record.status == "measured"]

    def _inputs(self, tokens: int, vocab: int) -> Inputs:
        setting = self.setting
        return make_inputs(tokens, setting.hidden, vocab, setting.dtype, setting.device, setting.seed)

    def _forward(self, path: LossPath) -> Forward:
        if path.name not in self._forwards:
            self._forwards[path.name] = path.prepare(self._place)
        return self._forwards[path.name]

    def _time(self, record: Record, inputs: Inputs, forward: Forward) -> None:
        record.seconds.append(seconds(lambda: answer(forward, inputs), self.setting.device))

    def _memory(self, record: Record, inputs: Inputs, forward: Forward) -> None:
        if isinstance(forward, OwnLoss):
            forward.largest_chunk = 0
        record.extra_bytes[inputs.tokens] = extra_bytes(lambda: answer(forward, inputs), self.setting.device)
        if isinstance(forward, OwnLoss):
            record.largest_chunk[inputs.tokens] = forward.largest_chunk

    def _attempt(self, record: Record, call: Callable[[Forward], T]) -> T | None:
        """Calls unless the path is out; an exception puts it out, with its reason in the record."""
        if record.status != "measured":
            return None
        try:
            return call(self._forward(record.path))
        except MissingPeer as missing:
            record.status, record.reason = "missing", str(missing)
        except ModuleNotFoundError as missing:
            record.status, record.reason = "missing", f"it needs {missing.name}, which is not installed"
        except Exception as error:
            # Whatever a peer raises is its result; the trace goes to stderr, the reason to the report.
            record.status, record.reason = "error", _reason(error)
            self.progress.close()
            traceback.print_exc()
        return None


def _reason(error: Exception) -> str:
    text = _ABSOLUTE.sub("", " ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."
