"""The two local pieces that megatron-core lacks, against plain formulas."""

from types import SimpleNamespace

import pytest
import torch

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl.policy.local_layers import LocalCoreAttention, LocalRMSNorm  # noqa: E402


def _config(**changes):
    values = {
        "normalization": "RMSNorm",
        "params_dtype": torch.float32,
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "attention_dropout": 0.0,
        "num_attention_heads": 4,
        "kv_channels": 6,
        "hidden_size": 24,
    }
    return SimpleNamespace(**{**values, **changes})


def _attention(**changes):
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    core = LocalCoreAttention.__new__(LocalCoreAttention)
    torch.nn.Module.__init__(core)
    LocalCoreAttention.__init__(core, _config(**changes), 1, None, "self", pg_collection=groups)
    return core


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


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 13])
def test_attention_is_causal_and_grouped(groups, length):
    torch.manual_seed(1)
    core = _attention()
    q = torch.randn(length, 2, 4, 6, dtype=torch.float64)
    k, v = (torch.randn(length, 2, groups, 6, dtype=torch.float64) for _ in range(2))
    out = core(q, k, v, None)
    wide = [x.repeat_interleave(4 // groups, dim=2) for x in (k, v)]
    scores = torch.einsum("sbhd,tbhd->bhst", q, wide[0]) / 6**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    exact = torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), wide[1]).reshape(length, 2, 24)
    torch.testing.assert_close(out, exact)


def test_padding_at_the_end_changes_no_real_token():
    torch.manual_seed(2)
    core = _attention()
    q, k, v = (torch.randn(9, 1, 4, 6) for _ in range(3))
    padded = [torch.cat([x, torch.full((4, 1, 4, 6), 1e3)]) for x in (q, k, v)]
    torch.testing.assert_close(core(*padded, None)[:9], core(q, k, v, None))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="context parallelism"):
        _attention(context_parallel_size=2)
    with pytest.raises(ValueError, match="attention-dropout 0"):
        _attention(attention_dropout=0.1)
    x = torch.zeros(2, 1, 4, 6)
    with pytest.raises(ValueError, match="packed"):
        _attention()(x, x, x, None, packed_seq_params=object())
