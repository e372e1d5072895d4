"""Which form of the passes is chosen, what it says, and that the forms agree."""

import os
import subprocess
import sys

import pytest
import torch

from megatron.rl.ops import elementwise
from megatron.rl.ops.elementwise import compiled, passes_for, plain

CPU = torch.device("cpu")
LARGE = 1 << 25


@pytest.fixture(autouse=True)
def forget_the_choice():
    elementwise._compiled_or_plain.cache_clear()
    yield
    elementwise._compiled_or_plain.cache_clear()


def test_small_chunks_are_never_worth_compiling(monkeypatch):
    monkeypatch.setattr(compiled, "why_not", lambda dtype: pytest.fail("was compiled"))
    assert passes_for(LARGE - 1, CPU, torch.float32) is plain


def test_large_chunks_are_compiled_where_that_works(monkeypatch):
    monkeypatch.setattr(compiled, "why_not", lambda dtype: None)
    assert passes_for(LARGE, CPU, torch.bfloat16) is compiled


def test_plain_passes_stand_in_without_a_compiler_and_say_so_once():
    program = """
import torch
from megatron.rl.ops.elementwise import passes_for, plain
for _ in range(3):
    assert passes_for(1 << 25, torch.device("cpu"), torch.float32) is plain
"""
    environment = os.environ | {"CXX": "/nowhere/g++"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "plain PyTorch" in line]
    assert len(said) == 1 and "/nowhere/g++" in said[0], done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_agree_with_the_plain_ones(dtype):
    """At several shapes, since one compilation must serve all; the truth is float64."""
    assert compiled.why_not(dtype) is None
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((7, 1009), (64, 97), (33, 4099), (5, 4096), (9, 1000)):
        logits = (5 * torch.randn(rows, columns, generator=generator)).to(dtype)
        inverse = torch.rand(rows, generator=generator) + 0.5
        for temperature in (None, inverse):
            scaled = logits.double() * (1 if temperature is None else temperature.double().unsqueeze(1))
            peak, sum_exp, weighted = compiled.statistics(logits, temperature, True)
            assert compiled.statistics(logits, temperature, False)[2] is None
            torch.testing.assert_close(peak, plain.statistics(logits, temperature, True)[0], rtol=0, atol=0)
            shifted = scaled - peak.double().unsqueeze(1)
            torch.testing.assert_close(sum_exp.double(), shifted.exp().sum(1), rtol=3e-6, atol=0)
            torch.testing.assert_close(weighted.double(), (shifted * shifted.exp()).sum(1), rtol=3e-6, atol=1e-6)
            constant, factor = torch.randn(2, rows, generator=generator)
            for slope in (None, factor):
                results = []
                for passes in (plain, compiled):
                    results.append(logits.clone())
                    passes.gradients_(results[-1], temperature, peak, constant, slope)
                unit = torch.finfo(dtype).eps
                torch.testing.assert_close(*results, rtol=max(2 * unit, 1e-5), atol=1e-6)
