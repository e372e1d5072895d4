"""The attention core against plain formulas: grouped heads, packed sequences, shares of context-parallel ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from megatron.rl.policy.local_attention import LocalCoreAttention  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402

SCALE = 6**-0.5


def attention(cp_group: Any = None, **changes: Any) -> LocalCoreAttention:
    values: dict[str, Any] = {
        "context_parallel_size": 1 if cp_group is None else cp_group.size(),
        "attention_dropout": 0.0,
        "num_attention_heads": 4,
        "kv_channels": 6,
        "hidden_size": 24,
    }
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1), cp=cp_group)
    config: Any = SimpleNamespace(**{**values, **changes})
    return LocalCoreAttention(config, 1, None, "self", pg_collection=groups)


def packed(lengths: list[int]) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, *lengths]).cumsum(0).int())


def exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[total, heads, d] and [total, groups, d] twice to [total, heads, d] by the definition."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    sees = (of[:, None] == of[None]) & torch.ones(len(of), len(of)).tril().bool()
    scores = torch.einsum("shd,thd->hst", q, k) * SCALE
    return torch.einsum("hst,thd->shd", scores.masked_fill(~sees, float("-inf")).softmax(-1), v)


def inputs(total: int, dtype: torch.dtype, batch: int | None = None, groups: int = 2) -> list[torch.Tensor]:
    """Query, key, value, and a gradient of the output."""
    generator = torch.Generator().manual_seed(total)
    between = () if batch is None else (batch,)
    shapes = [(total, *between, heads, 6) for heads in (4, groups, groups)] + [(total, *between, 24)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("length", [1, 13])
def test_attention_is_causal_and_grouped(groups, length):
    q, k, v, _ = inputs(length, torch.float64, batch=2, groups=groups)
    out = attention()(q, k, v, None)
    for row in range(2):
        exact = exactly(q[:, row], k[:, row], v[:, row], [length])
        torch.testing.assert_close(out[:, row], exact.reshape(length, 24))


@pytest.mark.parametrize("lengths", [[1], [13], [5, 1, 7], [1] * 13])
def test_packed_sequences_do_not_see_each_other(lengths):
    given = inputs(sum(lengths), torch.float64)
    plain, mine = ([x.clone().requires_grad_() for x in given[:3]] for _ in range(2))
    exact = exactly(*plain, lengths).reshape(-1, 24)
    exact.backward(given[3])
    out = attention()(*mine, None, packed_seq_params=packed(lengths))
    out.backward(given[3])
    torch.testing.assert_close(out, exact)
    for x, y in zip(mine, plain, strict=True):
        torch.testing.assert_close(x.grad, y.grad)


def test_padding_at_the_end_changes_no_real_token():
    q, k, v, _ = inputs(9, torch.float32, batch=1)
    padding = [torch.cat([x, torch.full((4, *x.shape[1:]), 1e3)]) for x in (q, k, v)]
    torch.testing.assert_close(attention()(*padding, None)[:9], attention()(q, k, v, None))


def test_memory_is_linear_in_the_tokens_of_a_pack():
    """What is kept for the backward pass of 8,192 packed tokens: no [tokens, tokens] of anything."""
    lengths = [256] * 32
    q, k, v, _ = inputs(8192, torch.float32)
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.add(x.numel()) or x, lambda x: x):
        attention()(q.requires_grad_(), k, v, None, packed_seq_params=packed(lengths))
    assert kept and max(kept) <= 8192 * 24


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="attention-dropout 0"):
        attention(attention_dropout=0.1)
    x = torch.zeros(6, 1, 4, 6)
    with pytest.raises(ValueError, match="no bias"):
        attention()(x, x, x, None, attention_bias=x)
    with pytest.raises(ValueError, match="do not fill 6 positions"):
        attention()(x[:, 0], x[:, 0], x[:, 0], None, packed_seq_params=packed([2, 3]))


def share(x: torch.Tensor, lengths: list[int], rank: int, ranks: int) -> torch.Tensor:
    parts = []
    for part in x.split(lengths):
        chunks = part.chunk(2 * ranks)
        parts += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(parts)


CASES: list[tuple[torch.dtype, list[int], int | None]] = [
    (torch.float64, [24], 2),
    (torch.float64, [8, 16, 48, 8], None),
    (torch.float32, [24], 1),
    (torch.float32, [8, 16, 48, 8], None),
    (torch.bfloat16, [8, 16, 48, 8], None),
]


def on_ranks(rank: int, ranks: int) -> list[list[torch.Tensor]]:
    """Of each case the output and the gradients of query, key and value here."""
    core, found = attention(dist.group.WORLD), []
    for dtype, lengths, batch in CASES:
        *qkv, grad = (share(x, lengths, rank, ranks) for x in inputs(sum(lengths), dtype, batch))
        qkv = [x.requires_grad_() for x in qkv]
        out = core(*qkv, None, packed_seq_params=packed(lengths) if batch is None else None)
        out.backward(grad)
        found.append([out.detach(), *(x.grad for x in qkv)])
    if ranks == 2:
        with pytest.raises(ValueError, match="cut into 4 chunks"):
            core(*(x[:6] for x in qkv), None, packed_seq_params=packed([6, 6]))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_ranks_give_one_ranks_numbers(ranks):
    """Values and gradients, to the rounding of the type; bfloat16 rounds what is added in float32 once."""
    by_rank = run_ranks(ranks, on_ranks)
    for number, (dtype, lengths, batch) in enumerate(CASES):
        *qkv, grad = (x.double() for x in inputs(sum(lengths), dtype, batch))
        qkv = [x.requires_grad_() for x in qkv]
        rows = [exactly(*(x[:, row] for x in qkv), lengths) for row in range(batch)] if batch else None
        out = torch.stack(rows, 1).flatten(2) if rows else exactly(*qkv, lengths).flatten(1)
        out.backward(grad)
        tolerance = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2}[dtype]
        for rank in range(ranks):
            expected = [share(x, lengths, rank, ranks) for x in (out.detach(), *(x.grad for x in qkv))]
            for found, exact in zip(by_rank[rank][number], expected, strict=True):
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
