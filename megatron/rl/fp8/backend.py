"""Layers of a model whose linears run in emulated FP8."""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.distributed import ProcessGroup

from megatron.rl.fp8.linear import EmulatedColumnParallelLinear, EmulatedRowParallelLinear
from megatron.rl.fp8.recipe import Fp8Config


def emulated_backend(
    base_provider: type[LocalSpecProvider],
    fp8: Fp8Config,
    *,
    amax_group: ProcessGroup | None,
    expert_amax_group: ProcessGroup | None,
) -> LocalSpecProvider:
    """``base_provider`` with the linears of attention, dense and shared MLPs, and experts in emulated FP8.

    The scales of activations and gradients are taken over ``amax_group``, the ranks that hold other tokens for the
    same dense weights (data and context parallel), and over ``expert_amax_group``, those for the same experts
    (expert data parallel). With None they are this rank's own; ranks then train on slightly different roundings.
    Embeddings, norms, the router and the output head do not come from a provider and stay in high precision.
    """
    column = partial(EmulatedColumnParallelLinear, fp8=fp8, amax_group=amax_group)
    row = partial(EmulatedRowParallelLinear, fp8=fp8, amax_group=amax_group)
    expert_column = partial(EmulatedColumnParallelLinear, fp8=fp8, amax_group=expert_amax_group)
    expert_row = partial(EmulatedRowParallelLinear, fp8=fp8, amax_group=expert_amax_group)

    class EmulatedProvider(base_provider):  # type: ignore[valid-type, misc]
        def column_parallel_linear(self) -> Any:
            return column

        def row_parallel_linear(self) -> Any:
            return row

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
            linears = MLPSubmodules(
                linear_fc1=expert_column, linear_fc2=expert_row, activation_func=self.activation_func()
            )
            return partial(SequentialMLP, submodules=linears)

    return EmulatedProvider()


class EmulatedLinears(NamedTuple):
    """How many linears run in emulated FP8."""

    dense: int
    experts: int


def count_emulated_linears(chunks: Iterable[torch.nn.Module]) -> EmulatedLinears:
    """The emulated linears that this rank holds in its pipeline ``chunks``."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    linears = [m for m in modules if isinstance(m, EmulatedColumnParallelLinear | EmulatedRowParallelLinear)]
    experts = sum(linear.is_expert for linear in linears)
    return EmulatedLinears(len(linears) - experts, experts)


def describe_emulation(fp8: Fp8Config, linears: EmulatedLinears) -> str:
    """One line for the start-up log."""
    gradients = "e5m2" if fp8.gradient_dtype == torch.float8_e5m2 else "e4m3"
    return (
        f"FP8 is emulated, not run on FP8 hardware: --fp8-format {fp8.format} (inputs and weights e4m3, output "
        f"gradients {gradients}), --fp8-recipe {fp8.recipe} (one scale a tensor); on this rank {linears.dense} dense "
        f"and {linears.experts} expert linears; embeddings, norms, router and head stay in high precision"
    )
