"""FP8 training where there is no FP8 hardware: the linears' operands are rounded to FP8 and multiplied."""

from megatron.rl.fp8.backend import EmulatedLinears, count_emulated_linears, describe_emulation, emulated_backend
from megatron.rl.fp8.recipe import Fp8Config, fp8_config_from_flags

__all__ = [
    "EmulatedLinears",
    "Fp8Config",
    "count_emulated_linears",
    "describe_emulation",
    "emulated_backend",
    "fp8_config_from_flags",
]
