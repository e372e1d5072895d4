"""Flags to recipes, and what is refused."""

import dataclasses

import pytest
import torch

from megatron.rl.errors import ConfigError
from megatron.rl.fp8 import Fp8Config, fp8_config_from_flags


@pytest.mark.parametrize("fmt, gradients", [("e4m3", torch.float8_e4m3fn), ("hybrid", torch.float8_e5m2)])
def test_a_format_says_what_is_rounded_to_what(fmt, gradients):
    config = fp8_config_from_flags(fmt, "tensorwise")
    assert config == Fp8Config(fmt, "tensorwise")
    assert config.forward_dtype == torch.float8_e4m3fn
    assert config.gradient_dtype == gradients


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Fp8Config("e4m3", "tensorwise").format = "hybrid"


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8", "custom"])
def test_a_recipe_that_is_not_emulated_is_refused_in_one_line(recipe):
    with pytest.raises(ConfigError, match=f"--fp8-recipe {recipe} is not emulated.*use tensorwise$") as caught:
        fp8_config_from_flags("e4m3", recipe)
    assert "\n" not in str(caught.value)


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigError, match="--fp8-format must be one of e4m3, hybrid .got e5m2."):
        fp8_config_from_flags("e5m2", "tensorwise")
