"""The GPU kernels, by Triton's interpreter everywhere and on the GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped] # noqa: E402
from triton.compiler import ASTSource, compile  # type: ignore[import-untyped] # noqa: E402

from megatron.rl.ops.elementwise import triton_kernels  # noqa: E402

OPTIONAL = ("inverse_temperature", "weighted_sums", "factors")
CHECKS = Path(__file__).with_name("triton_kernels_checks.py")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("interpret", [pytest.param("1", id="interpreter"), pytest.param("0", id="gpu", marks=ON_GPU)])
def test_kernels(interpret):
    """In a process of its own: Triton takes the way it runs kernels from the environment, when it is imported."""
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(CHECKS)],
        env=os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"},
        cwd=CHECKS.parents[5],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]


@pytest.mark.parametrize("optional", [False, True], ids=["bare", "full"])
@pytest.mark.parametrize("logits", ["*bf16", "*fp32"])
@pytest.mark.parametrize("kernel", [triton_kernels._statistics, triton_kernels._gradients_], ids=["pass1", "pass2"])
def test_kernels_compile_for_an_h100(kernel, logits, optional, monkeypatch, tmp_path):
    """The interpreter knows no types and no registers; the compiler needs no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = dict.fromkeys(kernel.arg_names, "*fp32") | {"logits": logits, "columns": "i32"}
    left_out = [] if optional else [name for name in signature if name in OPTIONAL]
    signature |= dict.fromkeys(left_out, "constexpr")
    source = ASTSource(kernel, signature, constexprs=dict.fromkeys(left_out))
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=triton_kernels._LAUNCH)
    assert compiled.asm["cubin"]
