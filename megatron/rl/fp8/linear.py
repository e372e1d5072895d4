"""megatron-core's parallel linears with the operands of all three GEMMs rounded to FP8.

Forward Q(X) Q(W)^T, data gradient Q(dY) Q(W), weight gradient Q(dY)^T Q(X). The FP8 numbers themselves are
multiplied, and both scales are applied to the sum, as FP8 tensor cores do. Communication is that of megatron-core's
linears, save that sequence-parallel inputs travel in FP8 and float32 row-parallel outputs are summed in float64 first.

The forward result does not depend on the parallel layout, for which two things are needed. First, a scale belongs to
the whole tensor: where ranks hold pieces of one, the largest magnitude is taken over them (Transformer Engine scales
the tensor-parallel shards of a weight separately). Every rank of a group must therefore run the same layers in the
same order, also those whose share is empty. Second, a float32 model's forward sums are exact: a difference in the last
bit would move some number of the next layer to the neighbouring FP8 number, up to an eighth away. Products of e4m3
numbers are multiples of 2^-18 below 2^18, so float64 holds sums of up to 2^17 of them exactly, in any order and over
any ranks. Backward sums are float32: the head's gradient already depends on the layout in its last bit.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.distributed import ProcessGroup

from megatron.rl.errors import ConfigError
from megatron.rl.fp8.quantize import QuantizedTensor, largest_magnitude, quantize, widen
from megatron.rl.fp8.recipe import Fp8Config


class EmulatedColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear in emulated FP8. ``amax_group``: the ranks that hold other tokens for the same weight."""

    def __init__(self, *args: Any, fp8: Fp8Config, amax_group: ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self.fp8 = fp8
        self.amax_group = amax_group

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **_: Any,
    ) -> torch.Tensor:
        layout = LinearLayout(
            tp_group=self.tp_group,
            amax_group=self.amax_group,
            input_is_shard=sequence_parallel,
            grad_is_shard=True,
            output_is_partial=False,
            gather_input=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
        )
        return emulated_linear(input, weight, bias, self.fp8, layout)


class EmulatedRowParallelLinear(RowParallelLinear):
    """Row-parallel linear in emulated FP8. ``amax_group``: the ranks that hold other tokens for the same weight."""

    def __init__(self, *args: Any, fp8: Fp8Config, amax_group: ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_unsupported(self)
        self.fp8 = fp8
        self.amax_group = amax_group

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        # The bias follows the reduction over ranks, and the base class adds it.
        layout = LinearLayout(
            tp_group=self.tp_group,
            amax_group=self.amax_group,
            input_is_shard=True,
            grad_is_shard=False,
            output_is_partial=True,
            gather_input=False,
            allreduce_dgrad=False,
        )
        return emulated_linear(input, weight, None, self.fp8, layout)


@dataclass(frozen=True)
class LinearLayout:
    """How a linear's operands are spread over ranks. Its weight is always a shard over ``tp_group``."""

    tp_group: ProcessGroup | None
    amax_group: ProcessGroup | None  # ranks that hold other tokens for the same weight
    input_is_shard: bool  # over tp_group, by features or by tokens
    grad_is_shard: bool  # the output's gradient, over tp_group
    output_is_partial: bool  # the output is the sum over tp_group, and the caller takes that sum
    gather_input: bool  # sequence parallelism: gather the input's tokens, reduce-scatter its gradient
    allreduce_dgrad: bool


def emulated_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fp8: Fp8Config, layout: LinearLayout
) -> torch.Tensor:
    """x [..., in] and weight [out, in] to [..., out] in x's dtype; x and weight of one dtype, float32 or bfloat16."""
    return _EmulatedLinear.apply(x, weight, bias, fp8, layout)


class _EmulatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        fp8: Fp8Config,
        layout: LinearLayout,
    ) -> torch.Tensor:
        qx, qw = _quantize_forward(x, weight, fp8.forward_dtype, layout)
        ctx.save_for_backward(qx.values, qw.values)
        ctx.scales = qx.scale_inv, qw.scale_inv
        ctx.fp8, ctx.layout = fp8, layout
        x_all = _gathered(qx.values, layout)
        scale = qx.scale_inv * qw.scale_inv
        if x.dtype == torch.float32:
            output = _multiply_exactly(x_all, qw.values, scale, layout)
        else:
            output = _multiply(_flat(widen(x_all, x.dtype)), widen(qw.values, x.dtype).t(), scale)
        if bias is not None:
            output = output + bias
        return output.view(*x_all.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x_values, w_values = ctx.saved_tensors
        x_scale, w_scale = ctx.scales
        layout: LinearLayout = ctx.layout
        qdy = _quantize_grad(grad, ctx.fp8.gradient_dtype, layout)
        dy = _flat(widen(qdy.values, grad.dtype))
        grad_x = grad_w = grad_bias = pending = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(dy, widen(w_values, grad.dtype), qdy.scale_inv * w_scale)
            grad_x, pending = _start_reduction(grad_x.view(*grad.shape[:-1], grad_x.shape[-1]), layout)
        if ctx.needs_input_grad[1]:
            x = _flat(widen(_gathered(x_values, layout), grad.dtype))
            grad_w = _multiply(dy.t(), x, qdy.scale_inv * x_scale)
        if ctx.needs_input_grad[2]:
            grad_bias = _flat(grad).sum(dim=0)
        if pending is not None:
            pending.wait()
        return grad_x, grad_w, grad_bias, None, None


def _quantize_forward(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, layout: LinearLayout
) -> tuple[QuantizedTensor, QuantizedTensor]:
    amax = torch.stack([largest_magnitude(x), largest_magnitude(weight)])
    _max_over(amax if layout.input_is_shard else amax[1:], layout.tp_group)
    _max_over(amax[:1], layout.amax_group)
    x_amax, w_amax = amax.tolist()
    return quantize(x, dtype, x_amax), quantize(weight, dtype, w_amax)


def _quantize_grad(grad: torch.Tensor, dtype: torch.dtype, layout: LinearLayout) -> QuantizedTensor:
    amax = largest_magnitude(grad)
    if layout.grad_is_shard:
        _max_over(amax, layout.tp_group)
    _max_over(amax, layout.amax_group)
    return quantize(grad, dtype, amax.item())


def _max_over(amax: torch.Tensor, group: ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)


def _gathered(values: torch.Tensor, layout: LinearLayout) -> torch.Tensor:
    """The FP8 ``values`` of all tokens: those of this rank, or under sequence parallelism of ``tp_group``'s ranks."""
    if not layout.gather_input:
        return values
    assert layout.tp_group is not None
    everything = values.new_empty((values.shape[0] * layout.tp_group.size(), *values.shape[1:]))
    # Collectives know bytes, not FP8.
    dist.all_gather_into_tensor(
        everything.view(torch.uint8), values.contiguous().view(torch.uint8), group=layout.tp_group
    )
    return everything


def _start_reduction(grad_x: torch.Tensor, layout: LinearLayout) -> tuple[torch.Tensor, dist.Work | None]:
    """Begins the sum of the ranks' shares of the input's gradient, which the weight's GEMM then overlaps."""
    if layout.gather_input:
        assert layout.tp_group is not None
        mine = grad_x.new_empty((grad_x.shape[0] // layout.tp_group.size(), *grad_x.shape[1:]))
        return mine, dist.reduce_scatter_tensor(mine, grad_x, group=layout.tp_group, async_op=True)
    if layout.allreduce_dgrad:
        return grad_x, dist.all_reduce(grad_x, group=layout.tp_group, async_op=True)
    return grad_x, None


def _multiply_exactly(x: torch.Tensor, w: torch.Tensor, scale: float, layout: LinearLayout) -> torch.Tensor:
    """``scale * x @ w^T`` in float32 of e4m3 numbers, the same bits for any order of the sum."""
    total = _flat(widen(x, torch.float64)) @ widen(w, torch.float64).t()
    group = layout.tp_group
    if layout.output_is_partial and group is not None and group.size() > 1:
        # The caller adds the ranks' outputs in float32, where only a sum with zeros is exact.
        dist.reduce(total, group=group, group_dst=0)
        if group.rank() != 0:
            total.zero_()
    return total.float().mul_(scale)


def _multiply(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """``scale * a @ b`` of matrices, in their dtype."""
    if a.dtype == torch.float32:
        # Not by alpha: with it the BLAS may scale partial sums, and rows then depend on the number of rows.
        return torch.mm(a, b).mul_(scale)
    return torch.addmm(a.new_zeros(1), a, b, beta=0, alpha=scale)  # rounded to a's dtype once, after the scale


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _refuse_unsupported(linear: Any) -> None:
    if linear.gradient_accumulation_fusion:
        raise ConfigError("emulated FP8 has no fused gradient accumulation; add --no-gradient-accumulation-fusion")
    if linear.gtp_remat_size > 1:
        raise ConfigError("emulated FP8 takes whole weights; leave the gathered-tensor-parallel sizes at 1")
