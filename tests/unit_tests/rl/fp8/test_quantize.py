"""Rounding to FP8 against a float64 model of the formats."""

import math

import pytest
import torch

from megatron.rl.fp8.quantize import largest_magnitude, quantize, scale_of, widen
from tests.unit_tests.rl.fp8 import reference

FORMATS = [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
FLOAT32_MAX = torch.finfo(torch.float32).max


def _quantize(x, dtype):
    return quantize(x, dtype, largest_magnitude(x).item())


@pytest.mark.parametrize("fmt, dtype", FORMATS)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float64])
def test_widening_is_exact_for_every_code(fmt, dtype, wide):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = widen(codes, wide)
    finite = numbers[numbers.isfinite()].double()
    assert numbers.dtype == wide
    torch.testing.assert_close(numbers, codes.to(wide), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(reference.round_to(finite, fmt), finite), "a number that is not in the format"
    assert finite.max() == reference.FORMATS[fmt][2]


def test_widening_keeps_the_shape_of_a_transposed_tensor():
    x = torch.arange(6.0).view(2, 3).to(torch.float8_e4m3fn)
    assert torch.equal(widen(x.t(), torch.float32), torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("fmt, dtype", FORMATS)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 3e37])
def test_rounding_against_float64(fmt, dtype, x_dtype, magnitude):
    torch.manual_seed(0)
    x = (torch.randn(37, 53) * magnitude).to(x_dtype)
    quantized = _quantize(x, dtype)
    exact = reference.round_trip(x, fmt)
    assert quantized.values.dtype == dtype
    torch.testing.assert_close(widen(quantized.values, torch.float64) * quantized.scale_inv, exact, rtol=0, atol=0)
    torch.testing.assert_close(quantized.dequantize(torch.float32), exact.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "fmt, dtype, bound", [("e4m3", torch.float8_e4m3fn, 2**-4), ("e5m2", torch.float8_e5m2, 2**-3)]
)
def test_error_bounds(fmt, dtype, bound):
    """Half a unit of the last mantissa bit for normal numbers, half the smallest number below them."""
    x = torch.logspace(-9, 0, 5001, base=10)
    quantized = _quantize(x, dtype)
    error = (quantized.dequantize(torch.float32) - x).abs()
    normal = x * scale_of(1.0, dtype) >= 2.0 ** reference.FORMATS[fmt][1]
    assert normal.any() and (~normal).any()
    assert (error / x)[normal].max() <= bound * (1 + 1e-6)
    assert (error / x)[normal].max() > 0.85 * bound, "the bound is not reached: the numbers are not FP8"
    smallest = 2.0 ** (reference.FORMATS[fmt][1] - reference.FORMATS[fmt][0])
    assert error[~normal].max() <= smallest / 2 * quantized.scale_inv * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_ties_go_to_the_even_mantissa_and_the_largest_is_exact(dtype):
    largest = torch.finfo(dtype).max
    step = 1 / 8 if dtype == torch.float8_e4m3fn else 1 / 4
    x = torch.tensor([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, largest])
    assert _quantize(x, dtype).dequantize(torch.float32).tolist() == [1.0, 1 + 2 * step, -1.0, largest]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_largest_magnitude_becomes_the_largest_number(dtype):
    """Whatever way its scale is rounded: nothing saturates and nothing overflows."""
    torch.manual_seed(1)
    for peak in (torch.rand(500) * 10 ** (60 * torch.rand(500) - 30)).tolist():
        values = _quantize(torch.tensor([peak, -peak]), dtype).values
        assert values.float().tolist() == [torch.finfo(dtype).max, -torch.finfo(dtype).max]


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_with_scale_one(x_dtype):
    quantized = _quantize(torch.zeros(3, 5, dtype=x_dtype), torch.float8_e4m3fn)
    assert quantized.scale_inv == 1.0
    assert torch.equal(quantized.dequantize(x_dtype), torch.zeros(3, 5, dtype=x_dtype))


def test_an_empty_tensor():
    quantized = _quantize(torch.zeros(0, 5), torch.float8_e4m3fn)
    assert quantized.scale_inv == 1.0
    assert quantized.dequantize(torch.float32).shape == (0, 5)


def test_one_huge_row_takes_the_others_resolution():
    """One scale a tensor: what a row loses to a huge neighbour is what block-wise recipes are for."""
    x = torch.full((2, 64), 1e-3)
    x[1] = 1e4
    rounded = _quantize(x, torch.float8_e4m3fn).dequantize(torch.float32)
    assert torch.equal(rounded[0], torch.zeros(64))
    torch.testing.assert_close(rounded[1], x[1], rtol=1e-6, atol=0)


def test_magnitudes_at_the_ends_of_float32():
    tiny = torch.tensor([1e-44, -3e-45])
    quantized = _quantize(tiny, torch.float8_e4m3fn)
    assert scale_of(1e-44, torch.float8_e4m3fn) == FLOAT32_MAX
    assert quantized.dequantize(torch.float32).isfinite().all()
    huge = torch.tensor([FLOAT32_MAX, 1.0])
    torch.testing.assert_close(_quantize(huge, torch.float8_e4m3fn).dequantize(torch.float64)[0].item(), FLOAT32_MAX)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_spoils_the_whole_tensor(bad, x_dtype):
    """Never a silent 448: every product with the tensor becomes NaN, which Megatron's checks see."""
    x = torch.ones(3, 4, dtype=x_dtype)
    x[1, 2] = bad
    assert largest_magnitude(x).item() == math.inf
    assert _quantize(x, torch.float8_e4m3fn).dequantize(torch.float32).isnan().all()


def test_a_shard_takes_the_scale_of_the_whole():
    torch.manual_seed(2)
    whole = torch.randn(8, 6)
    amax = whole.abs().max().item()
    parts = [quantize(part, torch.float8_e4m3fn, amax).dequantize(torch.float32) for part in whole.chunk(2)]
    assert torch.equal(torch.cat(parts), _quantize(whole, torch.float8_e4m3fn).dequantize(torch.float32))


def test_largest_magnitude_is_signless_and_takes_any_strides():
    assert largest_magnitude(torch.tensor([[1.0, -3.0], [2.0, 0.5]]).t()).item() == 3.0
    assert largest_magnitude(torch.tensor([2.0]).expand(7, 3)).item() == 2.0
