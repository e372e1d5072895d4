"""Time, memory and error of one call."""

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from loss_benchmark.inputs import Answer, Inputs

_ROWS = 4096  # of a gradient that are compared at a time


def floor_call(inputs: Inputs) -> Callable[[], None]:
    """The three matrix products that no path can do without, into outputs that exist already."""
    hidden, weight = inputs.hidden, inputs.weight
    logits = hidden.new_empty(inputs.tokens, inputs.vocab_size)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.t(), hidden, out=grad_weight)

    return call


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """How long ``call`` takes; on a GPU by its own clock, until all work is done."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        del result
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    result = call()
    taken = time.perf_counter() - began
    del result
    return taken


def extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that ``call`` holds at once beyond what was held before and what its result holds."""
    gc.collect()
    return _extra_on_gpu(call, device) if device.type == "cuda" else _extra_on_cpu(call)


def _extra_on_gpu(call: Callable[[], object], device: torch.device) -> int:
    call()  # tuning of kernels, which allocates, happens here
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    torch.cuda.synchronize(device)
    extra = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    del result
    return extra


def _extra_on_cpu(call: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its library talks to stderr about missing GPUs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    held = peak = 0
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None  # the block has ended
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    del result
    return peak - held


@dataclass(frozen=True)
class Errors:
    """Against float64."""

    grad_hidden: float  # norm of the difference over the norm of the exact gradient
    grad_weight: float  # likewise
    logprob: float | None  # largest difference, nats; None where a path gives none


def errors(answer: Answer, exact: Answer) -> Errors:
    """How far ``answer`` is from ``exact``."""
    logprob = None
    if answer.logprobs is not None and exact.logprobs is not None:
        logprob = (answer.logprobs.double() - exact.logprobs).abs().max().item()
    return Errors(
        _relative(answer.grad_hidden, exact.grad_hidden), _relative(answer.grad_weight, exact.grad_weight), logprob
    )


def rounding(exact: Answer, dtype: torch.dtype) -> Errors:
    """The errors of the exact gradients rounded to ``dtype``, which no path in that type can go below."""
    rounded = Answer(exact.grad_hidden.to(dtype), exact.grad_weight.to(dtype), None)
    return errors(rounded, exact)


def _relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    parts = zip(value.split(_ROWS), exact.split(_ROWS), strict=True)
    difference = sum((part.double() - truth).square().sum().item() for part, truth in parts)
    return (difference / exact.square().sum().item()) ** 0.5


class Progress:
    """What is being measured and how long all of it still takes, on stderr: one live line, or a line a stage."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._stage = ""

    def begin(self, work: int) -> None:
        """From now on that much work is to come, in tokens."""
        self._began = time.monotonic()
        self._done, self._total = 0, work

    def done(self, work: int, stage: str, detail: str) -> None:
        """That much of it is behind."""
        self._done += work
        left = (time.monotonic() - self._began) / self._done * (self._total - self._done)
        if self._live:
            print(f"\r\x1b[K{stage}, {detail}: about {left:.0f} s left", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(f"{stage}: about {left:.0f} s left", file=sys.stderr, flush=True)
        self._stage = stage

    def close(self) -> None:
        """Clears the live line."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
