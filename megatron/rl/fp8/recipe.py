"""Which FP8 format and scaling recipe is emulated, as Megatron's flags ask for it."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from megatron.rl.errors import ConfigError

FORMATS = ("e4m3", "hybrid")
EMULATED_RECIPES = ("tensorwise",)

# Megatron's flags, by destination, that change what FP8 hardware computes and that the emulation does not act on.
_UNEMULATED = {
    "fp8_margin": "--fp8-margin",
    "fp8_amax_history_len": "--fp8-amax-history-len",
    "fp8_amax_compute_algo": "--fp8-amax-compute-algo",
    "fp8_wgrad": "--no-fp8-wgrad",
    "fp8_output_proj": "--fp8-output-proj",
    "fp8_param_gather": "--fp8-param-gather",
    "fp8_quantizer_factory": "--fp8-quantizer-factory",
    "first_last_layers_bf16": "--first-last-layers-bf16",
    "num_layers_at_start_in_bf16": "--num-layers-at-start-in-bf16",
    "num_layers_at_end_in_bf16": "--num-layers-at-end-in-bf16",
    "moe_router_padding_for_fp8": "--moe-router-padding-for-fp8",
    "moe_router_padding_for_quantization": "--moe-router-padding-for-quantization",
}


@dataclass(frozen=True)
class Fp8Config:
    """One emulated recipe.

    ``tensorwise`` is Transformer Engine's Float8CurrentScaling: a GEMM operand has one scale, the format's
    largest number over the operand's largest magnitude now.
    """

    format: str
    recipe: str

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of inputs and weights."""
        return torch.float8_e4m3fn

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the gradients of outputs: hybrid gives them e5m2's range."""
        return torch.float8_e5m2 if self.format == "hybrid" else torch.float8_e4m3fn


def fp8_config_from_flags(fp8_format: str, fp8_recipe: str) -> Fp8Config:
    """The emulated recipe that ``--fp8-format`` and ``--fp8-recipe`` name; :class:`ConfigError` if it is not one."""
    if fp8_format not in FORMATS:
        raise ConfigError(f"--fp8-format must be one of {', '.join(FORMATS)} (got {fp8_format})")
    if fp8_recipe not in EMULATED_RECIPES:
        raise ConfigError(
            f"--fp8-recipe {fp8_recipe} is not emulated without FP8 hardware; use {' or '.join(EMULATED_RECIPES)}"
        )
    return Fp8Config(fp8_format, fp8_recipe)


def refuse_unemulated_flags(explicit: Collection[str]) -> None:
    """Raises :class:`ConfigError` if a flag was given that the emulation would ignore.

    ``explicit`` are the argparse destinations of the flags on the command line.
    """
    for destination, flag in _UNEMULATED.items():
        if destination in explicit:
            raise ConfigError(f"{flag} has no effect where FP8 is emulated; leave it out, or train on FP8 hardware")
