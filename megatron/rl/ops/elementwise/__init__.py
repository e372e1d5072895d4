"""The two passes over a chunk's logits that are all the element-wise work over the vocabulary, in three forms.

``plain`` runs anywhere, ``compiled`` is torch.compile's for CPUs, ``triton_kernels`` is for GPUs. All compute in
float32, read the logits in their own type, and agree to a few units in the last place. With x_ij = logits_ij *
inverse_temperature_i - peak_i:

* ``statistics(logits, inverse_temperature, with_entropy)`` gives, per row, float32, the peak over the columns of
  logits_ij * inverse_temperature_i, the sum of exp(x_ij), and the sum of x_ij exp(x_ij) (None unless asked for).
* ``gradients_(logits, inverse_temperature, peak, constant, factor)`` overwrites the logits by
  exp(x_ij) * (constant_i + factor_i * x_ij). ``factor`` may be None, for 0.

``logits`` is [n, columns] float32 or bfloat16, contiguous, neither empty; the others are [n] float32, and
``inverse_temperature`` may be None, for 1.
"""

import functools
import logging
from types import ModuleType

import torch

from megatron.rl.ops.elementwise import plain

_log = logging.getLogger(__name__)

# Logits of a chunk from which compiling pays: it takes ten seconds or more at first, and saves about 2 ns a logit.
_WORTH_COMPILING = 1 << 25


def passes_for(logits: int, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The form of the two passes for chunks of so many ``logits``: a module with both functions.

    Plain PyTorch stands in, with one line that says why, where a faster form is worth it but cannot be had.
    """
    if device.type == "cuda":
        return _triton_or_plain()
    if device.type == "cpu" and logits >= _WORTH_COMPILING:
        return _compiled_or_plain(dtype)
    return plain


@functools.cache
def _compiled_or_plain(dtype: torch.dtype) -> ModuleType:
    from megatron.rl.ops.elementwise import compiled

    reason = compiled.why_not(dtype)
    if reason is None:
        return compiled
    _log.warning("torch.compile does not work here (%s); the loss path uses plain PyTorch, which is slower", reason)
    return plain


@functools.cache
def _triton_or_plain() -> ModuleType:
    try:
        from megatron.rl.ops.elementwise import triton_kernels
    except ImportError as error:
        _log.warning("Triton cannot be imported (%s); the loss path uses plain PyTorch, which is slower", error)
        return plain
    return triton_kernels
