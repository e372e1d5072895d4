"""The emulated linears: against float64, against megatron-core's own, and over two ranks against one."""

import math

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402

from megatron.rl.errors import ConfigError  # noqa: E402
from megatron.rl.fp8 import Fp8Config, linear  # noqa: E402
from megatron.rl.fp8.linear import EmulatedColumnParallelLinear, EmulatedRowParallelLinear, LinearLayout  # noqa: E402
from megatron.rl.fp8.quantize import QuantizedTensor  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl.fp8 import reference, tiny  # noqa: E402

E4M3 = Fp8Config("e4m3", "tensorwise")
HYBRID = Fp8Config("hybrid", "tensorwise")
ALONE = LinearLayout(None, None, False, False, False, False, False)
PAIRS = {
    "column": (ColumnParallelLinear, EmulatedColumnParallelLinear, {"gather_output": False}),
    "row": (RowParallelLinear, EmulatedRowParallelLinear, {"input_is_parallel": True}),
}


@pytest.fixture(scope="module")
def alone():
    with tiny.alone() as groups:
        yield groups


def _build(cls, options, sizes, config, groups, bias=False, **fp8):
    module = cls(*sizes, config=config, init_method=torch.nn.init.normal_, bias=bias, skip_bias_add=False,
                 tp_group=groups.tp, **options, **fp8)  # fmt: skip
    if bias:
        with torch.no_grad():
            module.bias.normal_()
    return module


def _run(module, x, grad):
    """Output and the gradients of input, weight and bias (if any)."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    output, _ = module(x)
    output.backward(grad)
    bias = None if module.bias is None else module.bias.grad
    return output.detach(), x.grad, module.weight.grad, bias


def _assert_near(actual, exact, relative):
    """Largest error below ``relative`` times the largest magnitude: sums have cancelled, so not element by element."""
    assert (actual.double() - exact).abs().max() <= relative * exact.abs().max()


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("fp8, gradient_format", [(E4M3, "e4m3"), (HYBRID, "e5m2")])
@pytest.mark.parametrize("dtype, relative", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_all_three_products_against_float64(alone, kind, fp8, gradient_format, dtype, relative):
    torch.manual_seed(0)
    _, cls, options = PAIRS[kind]
    config = tiny.transformer_config(params_dtype=dtype)
    module = _build(cls, options, (37, 29), config, alone, bias=True, fp8=fp8, amax_group=None)
    x, grad = torch.randn(7, 3, 37).to(dtype), (1e-6 * torch.randn(7, 3, 29)).to(dtype)
    output, grad_x, grad_w, grad_bias = _run(module, x, grad)
    exact = reference.linear(x.view(21, 37), module.weight.detach(), grad.view(21, 29), gradient_format)
    assert output.dtype == grad_x.dtype == grad_w.dtype == dtype
    _assert_near(output.view(21, 29), exact[0] + module.bias.detach().double(), relative)
    _assert_near(grad_x.view(21, 37), exact[1], relative)
    _assert_near(grad_w, exact[2], relative)
    _assert_near(grad_bias, grad.double().sum((0, 1)), relative)


@pytest.fixture
def unquantized(monkeypatch):
    _without_quantization(monkeypatch.setattr)


def _without_quantization(replace):
    replace(linear, "quantize", lambda x, dtype, amax: QuantizedTensor(x, 1.0))
    replace(linear, "widen", lambda values, dtype: values.to(dtype))


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_quantization_it_is_megatrons_linear(alone, unquantized, kind, dtype):
    """Bit for bit, save the float32 forward, which is rounded once from an exact sum."""
    torch.manual_seed(1)
    theirs, ours, options = PAIRS[kind]
    config = tiny.transformer_config(params_dtype=dtype)
    plain = _build(theirs, options, (37, 29), config, alone, bias=True)
    emulated = _build(ours, options, (37, 29), config, alone, bias=True, fp8=E4M3, amax_group=None)
    emulated.load_state_dict(plain.state_dict())
    x, grad = torch.randn(7, 3, 37).to(dtype), torch.randn(7, 3, 29).to(dtype)
    expected, actual = _run(plain, x, grad), _run(emulated, x, grad)
    if dtype == torch.float32:
        torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-5)
    else:
        assert torch.equal(actual[0], expected[0])
    for a, b in zip(actual[1:], expected[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", PAIRS)
def test_no_tokens(alone, kind):
    _, cls, options = PAIRS[kind]
    module = _build(cls, options, (8, 6), tiny.transformer_config(), alone, fp8=E4M3, amax_group=None)
    output, grad_x, grad_w, _ = _run(module, torch.zeros(0, 8), torch.zeros(0, 6))
    assert output.shape == (0, 6) and grad_x.shape == (0, 8)
    assert torch.equal(grad_w, torch.zeros(6, 8))


def test_a_gradient_of_zeros_gives_zeros(alone):
    module = _column(alone)
    _, grad_x, grad_w, _ = _run(module, torch.randn(5, 8), torch.zeros(5, 6))
    assert not grad_x.any() and not grad_w.any()


def _column(alone, **changes):
    torch.manual_seed(2)
    config = tiny.transformer_config(**changes)
    return _build(EmulatedColumnParallelLinear, {}, (8, 6), config, alone, fp8=E4M3, amax_group=None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_spoils_the_layer(alone, bad):
    module = _column(alone)
    x, grad = torch.randn(5, 8), torch.randn(5, 6)
    spoiled = x.clone()
    spoiled[3, 4] = bad
    assert _run(module, spoiled, grad)[0].isnan().all()
    grad[1, 1] = bad
    output, grad_x, grad_w, _ = _run(module, x, grad)
    assert output.isfinite().all()
    assert grad_x.isnan().all() and grad_w.isnan().all()


def test_one_byte_a_number_is_kept_for_the_backward_pass(alone):
    module = _column(alone)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(torch.randn(5, 8, requires_grad=True))
    assert [(t.shape, t.dtype) for t in kept] == [((5, 8), torch.float8_e4m3fn), ((6, 8), torch.float8_e4m3fn)]


def test_a_frozen_weight_gets_no_gradient_and_a_frozen_input_none(alone):
    module = _column(alone)
    x, grad = torch.randn(5, 8), torch.randn(5, 6)
    _, grad_x, grad_w, _ = _run(module, x, grad)
    module.zero_grad()
    module(x)[0].backward(grad)
    assert torch.equal(module.weight.grad, grad_w)
    module.zero_grad()
    module.weight.requires_grad_(False)
    _, frozen_grad_x, none, _ = _run(module, x, grad)
    assert torch.equal(frozen_grad_x, grad_x) and none is None


@pytest.mark.parametrize("kind", PAIRS)
def test_fused_gradient_accumulation_is_refused(alone, kind, monkeypatch):
    monkeypatch.setattr("megatron.core.tensor_parallel.layers._grad_accum_fusion_available", True)
    _, cls, options = PAIRS[kind]
    config = tiny.transformer_config(gradient_accumulation_fusion=True)
    with pytest.raises(ConfigError, match="add --no-gradient-accumulation-fusion"):
        _build(cls, options, (8, 6), config, alone, fp8=E4M3, amax_group=None)


# Two ranks. Each function below runs on both, and asserts there.


def _two_ranks(rank, world_size):
    groups = tiny.Layout(tp=2).start()
    for fp8 in (E4M3, HYBRID):
        for sequence_parallel in (False, True):
            _column_is_the_whole(groups, fp8, sequence_parallel)
            _row_is_the_whole(groups, fp8, sequence_parallel)
    saved = linear.quantize, linear.widen
    _without_quantization(setattr)
    for kind in PAIRS:
        for sequence_parallel in (False, True):
            _communication_is_megatrons(groups, kind, sequence_parallel)
    linear.quantize, linear.widen = saved
    groups = tiny.Layout().start()
    for share in (4, 7, 0):
        _tokens_on_two_ranks_are_the_whole(groups, share)
    _only_reduced_scales_agree(groups)


def test_two_ranks():
    run_ranks(2, _two_ranks)


def _whole(fp8, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    output = linear.emulated_linear(x, weight, None, fp8, ALONE)
    output.backward(grad)
    return output.detach(), x.grad, weight.grad


def _data(seed):
    """Halves of very different magnitude, so that a shard's own scale would be wrong, and sums beyond 24 bits."""
    torch.manual_seed(seed)
    spread = torch.tensor([0.01, 1.0])
    x = torch.randn(6, 3, 130) ** 3 * spread.repeat_interleave(3)[:, None, None] * spread.repeat_interleave(65)
    weight = torch.randn(14, 130) ** 3 * spread.repeat_interleave(7)[:, None] * spread.flip(0).repeat_interleave(65)
    return x, weight, torch.randn(6, 3, 14) * spread.repeat_interleave(7)


def _mine(tensor, groups, dim):
    return tensor.chunk(2, dim=dim)[groups.tp.rank()].contiguous()


def _column_is_the_whole(groups, fp8, sequence_parallel):
    x, weight, grad = _data(3)
    expected = _whole(fp8, x, weight, grad)
    config = tiny.transformer_config(tiny.Layout(tp=2), sequence_parallel=sequence_parallel)
    module = _build(EmulatedColumnParallelLinear, {}, (130, 14), config, groups, fp8=fp8, amax_group=None)
    module.weight.data.copy_(_mine(weight, groups, 0))
    mine = _mine(x, groups, 0) if sequence_parallel else x
    output, grad_x, grad_w, _ = _run(module, mine, _mine(grad, groups, 2))
    assert torch.equal(output, _mine(expected[0], groups, 2))
    expected_grad_x = _mine(expected[1], groups, 0) if sequence_parallel else expected[1]
    torch.testing.assert_close(grad_x, expected_grad_x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_w, _mine(expected[2], groups, 0), rtol=1e-5, atol=1e-6)


def _row_is_the_whole(groups, fp8, sequence_parallel):
    x, weight, grad = _data(4)
    expected = _whole(fp8, x, weight, grad)
    config = tiny.transformer_config(tiny.Layout(tp=2), sequence_parallel=sequence_parallel)
    options = {"input_is_parallel": True}
    module = _build(EmulatedRowParallelLinear, options, (130, 14), config, groups, fp8=fp8, amax_group=None)
    module.weight.data.copy_(_mine(weight, groups, 1))
    output, grad_x, grad_w, _ = _run(module, _mine(x, groups, 2), _mine(grad, groups, 0) if sequence_parallel else grad)
    assert torch.equal(output, _mine(expected[0], groups, 0) if sequence_parallel else expected[0])
    torch.testing.assert_close(grad_x, _mine(expected[1], groups, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad_w, _mine(expected[2], groups, 1), rtol=1e-5, atol=1e-6)


def _communication_is_megatrons(groups, kind, sequence_parallel):
    """In bfloat16 and without quantisation, every bit is that of megatron-core's linear."""
    torch.manual_seed(5 + groups.tp.rank() * (kind == "row"))
    theirs, ours, options = PAIRS[kind]
    layout = tiny.Layout(tp=2)
    config = tiny.transformer_config(layout, sequence_parallel=sequence_parallel, params_dtype=torch.bfloat16)
    plain = _build(theirs, options, (10, 14), config, groups)
    emulated = _build(ours, options, (10, 14), config, groups, fp8=E4M3, amax_group=None)
    emulated.load_state_dict(plain.state_dict())
    x = torch.randn(6, 3, 5 if kind == "row" else 10, dtype=torch.bfloat16)
    grad = torch.randn_like(plain(x)[0])
    for a, b in zip(_run(emulated, x, grad)[:3], _run(plain, x, grad)[:3], strict=True):
        assert torch.equal(a, b)


def _tokens_on_two_ranks_are_the_whole(groups, share):
    """The first rank has ``share`` of seven tokens; with none it takes part in the scales all the same."""
    torch.manual_seed(6)
    x, grad = torch.randn(7, 8) * torch.logspace(-2, 0, 7)[:, None], torch.randn(7, 6)
    config = tiny.transformer_config()
    module = _build(EmulatedColumnParallelLinear, {}, (8, 6), config, groups, fp8=E4M3, amax_group=groups.dp_cp)
    expected = _whole(E4M3, x, module.weight.detach(), grad)
    rows = slice(0, share) if groups.dp.rank() == 0 else slice(share, 7)
    output, grad_x, grad_w, _ = _run(module, x[rows], grad[rows])
    assert torch.equal(output, expected[0][rows])
    assert torch.equal(grad_x, expected[1][rows])
    dist.all_reduce(grad_w)
    torch.testing.assert_close(grad_w, expected[2], rtol=1e-5, atol=1e-6)


def _only_reduced_scales_agree(groups):
    """The case above without a group: a rank's own scales round otherwise. Else it would prove nothing."""
    torch.manual_seed(7)
    x = torch.randn(8, 8) * torch.logspace(-2, 0, 8)[:, None]
    config = tiny.transformer_config()
    module = _build(EmulatedColumnParallelLinear, {}, (8, 6), config, groups, fp8=E4M3, amax_group=None)
    expected = _whole(E4M3, x, module.weight.detach(), torch.zeros(8, 6))
    if groups.dp.rank() == 0:
        assert not torch.equal(module(x[:4])[0], expected[0][:4])
