"""Runs the real megatron-core on CPUs over gloo. Inert where CUDA is present.

megatron-core places tensors with ``torch.cuda.current_device()``, ``.cuda()`` and ``device="cuda"``
literals, orders work with streams and events, keeps CUDA random states, and recognises tensors by type
names such as ``torch.cuda.FloatTensor``. :func:`install` redirects exactly these to the CPU, once per
process and only where no CUDA device exists. Nothing of the arithmetic is replaced.
"""

# mypy: disable-error-code="assignment, method-assign, return-value, misc"
# (this module replaces torch's own attributes by stand-ins, which no stub foresees)

import contextlib
import functools
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "eye", "linspace")
_LIKE_FACTORIES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_installed = False


def is_cpu_platform() -> bool:
    """True where no CUDA device can be used, that is, where :func:`install` takes effect."""
    return not torch.cuda.is_available()


def install() -> bool:
    """Redirects megatron-core's CUDA calls to the CPU where CUDA is absent.

    Call it before megatron-core builds anything. Returns whether this process runs on the CPU platform.
    Calling it again changes nothing.
    """
    global _installed
    if not is_cpu_platform():
        return False
    if not _installed:
        _leave_jit_fusion_out()
        _redirect_devices()
        _redirect_streams()
        _redirect_random_state()
        _redirect_type_names()
        _redirect_token_counts()
        # Megatron demands it of pre-Blackwell GPUs under tensor parallelism; without a GPU it has no effect.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        _installed = True
    return True


@contextlib.contextmanager
def one_device_per_rank() -> Iterator[None]:
    """Within the block ``torch.cuda.device_count()`` is 1 on the CPU platform.

    Megatron's start-up builds its process groups and random states only where it counts a device.
    """
    if not is_cpu_platform():
        yield
        return
    original = torch.cuda.device_count
    torch.cuda.device_count = lambda: 1
    try:
        yield
    finally:
        torch.cuda.device_count = original


def _leave_jit_fusion_out() -> None:
    """megatron-core compiles its small fusions at their first call: many seconds here, for nothing gained on CPUs."""
    if "megatron.core.jit" in sys.modules:
        raise RuntimeError("cpu_platform.install() must come before the first import of megatron.core")
    compile_, torch.compile = torch.compile, lambda function: function
    try:
        importlib.import_module("megatron.core.jit")
    finally:
        torch.compile = compile_


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _without_cuda(function: Callable) -> Callable:
    """``function`` with a ``device=`` argument that names CUDA replaced by the CPU, and without pinned memory."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # which needs a CUDA driver
        return function(*args, **kwargs)

    return on_cpu


def _redirect_devices() -> None:
    # ``with torch.device(...)`` recognises the factories by identity, and remembers them at its first use.
    _device_constructors()
    for name in _FACTORIES + _LIKE_FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))

    original_to = torch.Tensor.to

    @functools.wraps(original_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(self, *args, **kwargs)

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.to = to
    torch.Tensor.cuda = stay
    torch.nn.Module.cuda = stay
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    torch.cuda.get_device_properties = lambda device=None: _CpuProperties()


class _CpuProperties:
    """Of a device's properties the ones that Megatron's argument checks read: an architecture before any GPU's."""

    major = 0
    minor = 0
    name = "cpu"


class _Stream:
    """A stream on a machine with one: everything is already in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()


class _Event:
    """An event that has happened once it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        """Milliseconds between two recorded events, as CUDA's."""
        return (end._time - self._time) * 1e3


def _redirect_streams() -> None:
    only_stream = _Stream()

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.current_stream = lambda device=None: only_stream
    torch.cuda.default_stream = lambda device=None: only_stream
    torch.cuda.set_stream = nothing
    torch.cuda.synchronize = nothing
    torch.cuda.empty_cache = nothing
    torch.cuda.reset_peak_memory_stats = nothing
    torch.Tensor.record_stream = nothing


def _redirect_random_state() -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    # It warns wherever the CPU's state moves inside a block with the GPU's; here they are one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.random.get_rng_state = get_state
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _with_cuda_type_names(function: Callable) -> Callable:
    """``function`` during which ``tensor.type()`` names the CUDA type of the tensor's dtype."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        original = torch.Tensor.type

        def cuda_type(self: torch.Tensor, *type_args: Any, **type_kwargs: Any) -> Any:
            if type_args or type_kwargs or self.dtype not in _TYPE_NAMES:
                return original(self, *type_args, **type_kwargs)
            return _TYPE_NAMES[self.dtype]

        torch.Tensor.type = cuda_type
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = original

    return named


def _redirect_type_names() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = clip
    optimizer.clip_grad_by_total_norm_fp32 = clip
    for cls in (optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        cls.__init__ = _with_cuda_type_names(cls.__init__)


class _Counts(list):
    """A list of ints with the one method of an array that megatron-core calls on it."""

    def tolist(self) -> list[int]:
        return list(self)


def _redirect_token_counts() -> None:
    """gloo's all-to-all wants its split sizes as lists of ints; on CUDA they arrive as numpy arrays."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return _Counts(tensor.tolist()) if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = as_list
    token_dispatcher.maybe_move_tensor_to_cpu = as_list
