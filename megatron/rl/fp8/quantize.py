"""Rounding tensors to FP8 numbers with one scale, and back."""

import functools
import math
import struct
from dataclasses import dataclass

import torch

_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class QuantizedTensor:
    """The tensor ``values * scale_inv``, held in one byte a number."""

    values: torch.Tensor  # float8_e4m3fn or float8_e5m2
    scale_inv: float  # a float32 number; NaN where the tensor was not finite

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in ``dtype``, rounded to it once."""
        return (widen(self.values, torch.float32) * self.scale_inv).to(dtype)


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """max(abs(x)) as a float32 scalar: 0 of an empty tensor, inf of one with an inf or a NaN.

    NaN becomes inf because a maximum over ranks may drop a NaN, but never an inf.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().nan_to_num(nan=math.inf, posinf=math.inf)


def scale_of(amax: float, dtype: torch.dtype) -> float:
    """The float32 factor that takes ``amax`` to the largest number of the FP8 ``dtype``.

    As in Transformer Engine it is 1 for a tensor of zeros, and float32's largest number where ``amax`` is so small
    that the factor would overflow. A tensor that is not finite gets NaN, so that everything computed from it is NaN
    and Megatron's checks stop the run; Transformer Engine would saturate an inf to the format's largest number.
    """
    if not math.isfinite(amax):
        return math.nan
    if amax == 0.0:
        return 1.0
    return _round_to_float32(min(torch.finfo(dtype).max / amax, _FLOAT32_MAX))


def quantize(x: torch.Tensor, dtype: torch.dtype, amax: float) -> QuantizedTensor:
    """``x`` in the FP8 ``dtype``, each number rounded to the nearest, ties to even.

    ``amax`` is the largest magnitude of ``x``, or of the larger tensor that ``x`` is a piece of; so nothing saturates.
    """
    scale = scale_of(amax, dtype)
    return QuantizedTensor((x.float() * scale).to(dtype), _round_to_float32(1.0 / scale))


def widen(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP8 ``values`` in a wider ``dtype``, exactly.

    By look-up: torch's own conversion from float8_e4m3fn costs six times as much on a CPU.
    """
    numbers = _numbers(values.dtype, dtype, values.device)
    codes = values.view(torch.uint8).reshape(-1).int()
    return numbers.index_select(0, codes).view(values.shape)


@functools.cache
def _numbers(fp8_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What each of the 256 codes stands for."""
    return torch.arange(256, dtype=torch.uint8).view(fp8_dtype).to(dtype).to(device)


def _round_to_float32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]
