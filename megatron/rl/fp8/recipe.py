"""Which FP8 format and scaling recipe is emulated, as Megatron's flags ask for it."""

from dataclasses import dataclass

import torch

from megatron.rl.errors import ConfigError

FORMATS = ("e4m3", "hybrid")
EMULATED_RECIPES = ("tensorwise",)


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
