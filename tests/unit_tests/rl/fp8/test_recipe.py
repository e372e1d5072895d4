"""Flags to recipes, and what is refused."""

import dataclasses

import pytest
import torch

from megatron.rl.errors import ConfigError
from megatron.rl.fp8 import Fp8Config, fp8_config_from_flags, refuse_unemulated_flags


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


def test_flags_that_would_be_ignored_are_refused():
    refuse_unemulated_flags({"fp8", "fp8_recipe", "lr"})
    with pytest.raises(ConfigError, match="^--no-fp8-wgrad has no effect where FP8 is emulated"):
        refuse_unemulated_flags({"lr", "fp8_wgrad"})


def test_every_refused_flag_exists_in_megatron():
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    from megatron.rl.fp8.recipe import _UNEMULATED

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    options = {action.dest: action.option_strings for action in parser._actions}
    for destination, flag in _UNEMULATED.items():
        assert flag in options[destination]
