"""FP8 arithmetic in float64, written from the formats' definitions and sharing nothing with the code under test."""

import torch

# format: (mantissa bits, exponent of the smallest normal number, largest number)
FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}


def round_to(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Each number of float64 ``x`` to the nearest of the format, ties to the even mantissa, saturating."""
    bits, smallest, largest = FORMATS[fmt]
    exponent = (torch.frexp(x).exponent - 1).clamp(min=smallest)
    step = torch.exp2(exponent.double() - bits)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def round_trip(x: torch.Tensor, fmt: str, amax: float | None = None) -> torch.Tensor:
    """``x`` to the format with one float32 scale and back, in float64. ``amax`` is x's own unless given."""
    peak = torch.tensor(x.float().abs().max().item() if amax is None else amax, dtype=torch.float32)
    scale = torch.tensor(FORMATS[fmt][2], dtype=torch.float32) / peak if peak > 0 else torch.tensor(1.0)
    inverse = 1 / scale
    return round_to((x.float() * scale).double(), fmt) * inverse.double()


def linear(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, gradient_format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, gradient of the input and gradient of the weight of one linear, in float64; x and grad are matrices."""
    x, weight = round_trip(x, "e4m3"), round_trip(weight, "e4m3")
    grad = round_trip(grad, gradient_format)
    return x @ weight.T, grad @ weight, grad.T @ x
