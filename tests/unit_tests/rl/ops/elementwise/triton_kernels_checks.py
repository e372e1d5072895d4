"""What test_triton_kernels.py runs in a process of its own: the kernels by Triton's interpreter, or on a GPU.

By ``TRITON_INTERPRET=1``, which must be set before Triton is imported, the kernels run on CPU tensors.
"""

import numpy as np
import pytest
import torch
import triton  # type: ignore[import-untyped]

from megatron.rl.ops.elementwise import plain, triton_kernels

INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cpu" if INTERPRETED else "cuda"
EPS = torch.finfo(torch.float32).eps
# The interpreter's numpy speaks up at -inf times 0, before it is replaced, and at columns that are not there.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _rounding_to_nearest(monkeypatch):
    """The interpreter cuts bfloat16 numbers off where a GPU rounds them."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    convert = interpreter._convert_float

    def rounded(numbers, input_dtype, output_dtype, mode):
        if not (input_dtype.is_fp32() and output_dtype.is_bf16()):
            return convert(numbers, input_dtype, output_dtype, mode)
        bits = torch.from_numpy(numbers.copy()).bfloat16().view(torch.int16)
        return bits.numpy().view(np.uint16).reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def _random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def _inverse_temperature(rows, used):
    return 0.5 + _random(rows, seed=1).abs() if used else None


def _statistics(logits, inverse_temperature=None):
    """The first pass with the sum for the entropy: three tensors."""
    peak, sum_exp, weighted = triton_kernels.statistics(logits, inverse_temperature, True)
    assert weighted is not None
    return peak, sum_exp, weighted


def _shifted(logits, inverse_temperature, peak):
    """x in float64, from the float32 product that is the scaled logit."""
    scaled = logits.float() if inverse_temperature is None else logits.float() * inverse_temperature[:, None]
    return scaled.double() - peak.double()[:, None]


def _exact_sums(logits, inverse_temperature, peak):
    x = _shifted(logits, inverse_temperature, peak)
    return x.exp().sum(1), torch.where(x == -torch.inf, 0.0, x * x.exp()).sum(1)


def _assert_as_good_as(got, reference, exact, slack):
    """``got`` is finite and no farther from ``exact`` than ``reference`` is, but for ``slack``."""
    assert got.isfinite().all()
    excess = (got.double() - exact).abs() - (reference.double() - exact).abs().nan_to_num(0.0) - slack
    assert (excess <= 0).all(), f"worse by {excess.max().item():.3g}, where {slack.max().item():.3g} more is allowed"


def _check_statistics(logits, inverse_temperature):
    before = logits.clone()
    peak, sum_exp, weighted = _statistics(logits, inverse_temperature)
    expected = plain.statistics(logits, inverse_temperature, True)
    assert torch.equal(logits, before)
    assert torch.equal(peak, expected[0])
    for got, reference, exact in zip(
        (sum_exp, weighted), expected[1:], _exact_sums(logits, inverse_temperature, peak), strict=True
    ):
        assert got.dtype == torch.float32
        _assert_as_good_as(got, reference, exact, 4 * EPS * exact.abs())

    without = triton_kernels.statistics(logits, inverse_temperature, False)
    assert torch.equal(without[0], peak) and without[2] is None
    torch.testing.assert_close(without[1], sum_exp, rtol=EPS, atol=0)


def _check_gradients(logits, inverse_temperature, with_factor):
    rows = logits.shape[0]
    peak, constant = plain.statistics(logits, inverse_temperature, False)[0], _random(rows, seed=2)
    factor = _random(rows, seed=3) if with_factor else None
    x = _shifted(logits, inverse_temperature, peak)
    slope, size = constant.double()[:, None], constant.double().abs()[:, None]
    if factor is not None:
        slope, size = slope + factor.double()[:, None] * x, size + factor.double().abs()[:, None] * x.abs()
    hidden = x == -torch.inf
    exact = torch.where(hidden, 0.0, slope * x.exp())
    # exp(x) is off by |x| roundings wherever x itself is.
    slack = torch.where(hidden, 0.0, (4 + x.abs()) * EPS * size * x.exp())
    # A GPU takes an exp(x) below float32's normal numbers for 0; the slope there is some hundreds.
    slack += 1000 * torch.finfo(torch.float32).tiny

    got, reference = logits.clone(), logits.clone()
    triton_kernels.gradients_(got, inverse_temperature, peak, constant, factor)
    plain.gradients_(reference, inverse_temperature, peak, constant, factor)
    _assert_as_good_as(got, reference, exact, slack)
    assert (got[hidden] == 0).all()


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize("columns", [1, 2, 127, 1009, 4096, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(dtype, columns, rows, temperature):
    logits = 5 * _random(rows, columns)
    logits[0, -1] = 40.0  # a peak in the last column, of the last block
    logits = logits.to(dtype)
    inverse_temperature = _inverse_temperature(rows, temperature)
    _check_statistics(logits, inverse_temperature)
    for with_factor in (False, True):
        _check_gradients(logits, inverse_temperature, with_factor)


def _awkward_rows(dtype):
    columns = 9001  # three blocks
    rows = _random(9, columns)
    rows[0] += 1e4
    rows[1] -= 1e4
    rows[2] = 7.25
    rows[3] = torch.linspace(-80, 80, columns)  # the peak moves in every block
    rows[4] = torch.linspace(80, -80, columns)
    rows[5, 3] = 1e38  # the rise from the lowest number overflows float32
    rows[6, :5000] = -torch.inf  # the first block has no finite logit
    rows[7, 1::2] = -torch.inf
    rows[8, :-1] = -torch.inf
    return rows.to(dtype)


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_awkward_rows(dtype, temperature):
    logits = _awkward_rows(dtype)
    inverse_temperature = _inverse_temperature(len(logits), temperature)
    _check_statistics(logits, inverse_temperature)
    for with_factor in (False, True):
        _check_gradients(logits, inverse_temperature, with_factor)


def test_equal_logits_have_exact_sums():
    logits = torch.full((1, 5000), 1e4 + 0.125, device=DEVICE)
    _, sum_exp, weighted = _statistics(logits, torch.full((1,), 1 / 3, device=DEVICE))
    assert sum_exp.item() == 5000 and weighted.item() == 0


def test_a_row_without_a_finite_logit_weighs_nothing():
    logits = torch.full((1, 5000), -torch.inf, device=DEVICE)
    peak, sum_exp, weighted = _statistics(logits)
    assert (peak.item(), sum_exp.item(), weighted.item()) == (torch.finfo(torch.float32).min, 0, 0)
    triton_kernels.gradients_(logits, None, peak, torch.ones_like(peak), torch.ones_like(peak))
    assert (logits == 0).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 4999])
def test_nan_and_infinity_show(column, bad):
    logits = _random(2, 5000)
    logits[0, column] = bad
    _, sum_exp, weighted = _statistics(logits)
    assert sum_exp[0].isnan() and sum_exp[1].isfinite()
    assert weighted[0].isnan() and weighted[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1, 20])
def test_a_whole_vocabulary_keeps_the_digits_and_repeats(dtype, spread):
    logits = (spread * _random(2, 151_936)).to(dtype)
    peak, sum_exp, weighted = _statistics(logits)
    for got, exact in zip((sum_exp, weighted), _exact_sums(logits, None, peak), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=4 * EPS, atol=0)
    again = _statistics(logits)
    assert all(torch.equal(one, other) for one, other in zip(again, (peak, sum_exp, weighted), strict=True))


@pytest.mark.parametrize("temperature", [False, True])
def test_both_passes_give_the_gradient_of_a_loss(temperature):
    """The loss a log p_y + b H per row, against autograd in float64."""
    rows, columns = 5, 4099
    logits, targets = 3 * _random(rows, columns), torch.tensor([0, 1, 17, 4096, 4098], device=DEVICE)
    a, b = _random(rows, seed=4), _random(rows, seed=5)
    inverse_temperature = _inverse_temperature(rows, temperature)
    scale = torch.ones(rows, device=DEVICE) if inverse_temperature is None else inverse_temperature
    leaf = logits.double().requires_grad_()
    logs = (leaf * scale.double()[:, None]).log_softmax(1)
    row = torch.arange(rows, device=DEVICE)
    (a.double() * logs[row, targets] - b.double() * (logs.exp() * logs).sum(1)).sum().backward()

    peak, sum_exp, weighted = _statistics(logits, inverse_temperature)
    entropy = sum_exp.log() - weighted / sum_exp
    factor = -b * scale / sum_exp
    constant = -a * scale / sum_exp + factor * (entropy - sum_exp.log())
    triton_kernels.gradients_(logits, inverse_temperature, peak, constant, factor)
    logits[row, targets] += a * scale
    torch.testing.assert_close(logits.double(), leaf.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter would take hours for so many logits")
def test_more_logits_than_32_bits_count():
    columns = 151_936
    logits = torch.zeros((1 << 31) // columns + 2, columns, dtype=torch.bfloat16, device=DEVICE)
    logits[-1, -1] = 3.0
    peak, sum_exp, _ = triton_kernels.statistics(logits, None, False)
    assert peak[-1].item() == 3 and (sum_exp[:-1] == columns).all()
    triton_kernels.gradients_(logits, None, peak, torch.ones_like(peak), None)
    assert (logits[:-1] == 1).all() and logits[-1, -1].item() == 1 and (logits[-1, :-1] < 0.1).all()
