"""The norm that megatron-core lacks, against its plain formula."""

from types import SimpleNamespace

import pytest
import torch

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl.policy.local_layers import LocalRMSNorm  # noqa: E402


def _config(**changes):
    values = {
        "normalization": "RMSNorm",
        "params_dtype": torch.float32,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_against_float64(dtype):
    torch.manual_seed(0)
    norm = LocalRMSNorm(_config(params_dtype=dtype, sequence_parallel=True), 37, eps=1e-6)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(5, 3, 37).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    assert norm.weight.sequence_parallel is True
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x).double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_layer_norm_is_refused():
    with pytest.raises(ValueError, match="RMSNorm only .got LayerNorm"):
        LocalRMSNorm(_config(normalization="LayerNorm"), 8)
