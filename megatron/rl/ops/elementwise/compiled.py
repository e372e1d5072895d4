"""The two passes compiled by torch.compile: each reads the logits from memory once and keeps nothing beside them.

For CPUs; a C++ compiler is needed at run time. Shapes are dynamic, so that one compilation for each type of logits
serves every chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

_PARTS = 64  # at most, in which a row is summed


def why_not(dtype: torch.dtype) -> str | None:
    """Compiles the passes for logits of ``dtype`` and tries them; None, or in one line why that does not work."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    logits, row = torch.zeros(4, 96, dtype=dtype), torch.ones(4)
    try:
        statistics(logits, None, True)
        gradients_(logits, None, row, row, None)
    except (TorchDynamoException, InductorError) as error:
        # Dynamo's wrapper ends its first line with "raised:"; the reason follows it.
        return " ".join(str(error).split("\n\n")[0].split())
    return None


def statistics(
    logits: torch.Tensor, inverse_temperature: torch.Tensor | None, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :mod:`megatron.rl.ops.elementwise`."""
    # Inductor adds one after the other in float32, which over a long row loses ten times the digits of torch.sum. So
    # a row is taken in parts, as if several ranks had it, wherever its length can be divided.
    rows, columns = logits.shape
    parts = math.gcd(columns, _PARTS)
    scale = _factor_of_one(logits, inverse_temperature).repeat_interleave(parts)
    # The pass waits for memory, so the entropy and a factor of 1 cost less than further compilations would.
    found = _compiled(_statistics)(logits.view(rows * parts, columns // parts), scale)
    peaks, sums, weighted = (values.view(rows, parts) for values in found)
    peak = peaks.amax(1)
    distance = peaks - peak.unsqueeze(1)
    share = distance.exp()
    entropy_sum = (share * (weighted + distance * sums)).sum(1) if with_entropy else None
    return peak, (share * sums).sum(1), entropy_sum


def gradients_(
    logits: torch.Tensor,
    inverse_temperature: torch.Tensor | None,
    peak: torch.Tensor,
    constant: torch.Tensor,
    factor: torch.Tensor | None,
) -> None:
    """See :mod:`megatron.rl.ops.elementwise`."""
    scale = _factor_of_one(logits, inverse_temperature)
    if factor is None:
        _compiled(_gradients_)(logits, scale, peak, constant)
    else:
        _compiled(_gradients_with_entropy_)(logits, scale, peak, constant, factor)


def _factor_of_one(logits: torch.Tensor, inverse_temperature: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(logits.shape[0]) if inverse_temperature is None else inverse_temperature


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without the option the code is parallel only if the first call was large, and for that call's number of threads.
    compiled = torch.compile(function, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})
    return torch.no_grad()(compiled)  # autograd has no part in this, and each of its modes would be compiled anew


def _statistics(logits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scaled = logits.float() * scale[:, None]
    peak = scaled.amax(1)
    shifted = scaled - peak[:, None]
    exponentials = shifted.exp()
    return peak, exponentials.sum(1), (shifted * exponentials).sum(1)


def _gradients_(logits: torch.Tensor, scale: torch.Tensor, peak: torch.Tensor, constant: torch.Tensor) -> None:
    logits.copy_((logits.float() * scale[:, None] - peak[:, None]).exp() * constant[:, None])


def _gradients_with_entropy_(
    logits: torch.Tensor, scale: torch.Tensor, peak: torch.Tensor, constant: torch.Tensor, factor: torch.Tensor
) -> None:
    shifted = logits.float() * scale[:, None] - peak[:, None]
    logits.copy_((shifted * factor[:, None] + constant[:, None]) * shifted.exp())
