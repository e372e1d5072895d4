"""The two passes compiled by torch.compile: each reads the logits from memory once and keeps nothing beside them.

For CPUs; a C++ compiler is needed at run time. Shapes are dynamic, so that one compilation for each type of logits
serves every chunk.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


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
    # The pass waits for memory, so the entropy and a factor of 1 cost less than further compilations would.
    peak, sum_exp, weighted = _compiled(_statistics)(logits, _factor_of_one(logits, inverse_temperature))
    return peak, sum_exp, weighted if with_entropy else None


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
    return torch.compile(function, dynamic=True, fullgraph=True, options={"cpp.dynamic_threads": True})


def _statistics(logits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scaled = logits.float() * scale[:, None]
    peak = scaled.amax(1)
    shifted = scaled - peak[:, None]
    exponentials = shifted.exp()
    # Inductor adds one after the other: in float32 that loses ten times the digits of torch.sum.
    sum_exp = exponentials.sum(1, dtype=torch.float64)
    weighted = (shifted * exponentials).sum(1, dtype=torch.float64)
    return peak, sum_exp.float(), weighted.float()


def _gradients_(logits: torch.Tensor, scale: torch.Tensor, peak: torch.Tensor, constant: torch.Tensor) -> None:
    logits.copy_((logits.float() * scale[:, None] - peak[:, None]).exp() * constant[:, None])


def _gradients_with_entropy_(
    logits: torch.Tensor, scale: torch.Tensor, peak: torch.Tensor, constant: torch.Tensor, factor: torch.Tensor
) -> None:
    shifted = logits.float() * scale[:, None] - peak[:, None]
    logits.copy_((shifted * factor[:, None] + constant[:, None]) * shifted.exp())
