"""The attention core of the local layers: causal, by torch's memory-efficient kernels, packed or not.

Under context parallelism a sequence's positions are dealt to the ranks as Transformer Engine and megatron-core deal
them: in 2 x ranks chunks, of which rank r has the r-th and the r-th from the end, so that all have the same work.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch.distributed import ProcessGroup

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class LocalCoreAttention(MegatronModule):
    """Causal attention within each sequence, memory linear in the tokens.

    Padding stands at the end of a sequence, so the causal mask already keeps it from every real token.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if pg_collection is None:
            raise ValueError("the local attention core needs its process groups")
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"policies are trained without attention dropout; pass --attention-dropout 0 (got {dropout})"
            )
        heads = divide(config.num_attention_heads, pg_collection.tp.size())
        head_size = config.kv_channels or divide(config.hidden_size, config.num_attention_heads)
        self.output_size = heads * head_size
        self.softmax_scale = head_size**-0.5 if softmax_scale is None else softmax_scale
        self._cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[s, b, heads, d] and twice [s, b, groups, d] to [s, b, heads * d]; packed, all without b.

        ``s`` are this context-parallel rank's positions. Packed, ``packed_seq_params.cu_seqlens_q`` holds the bounds of
        the whole sequences, those of all ranks together.
        """
        if attention_bias is not None:
            raise ValueError("the local attention core takes no bias")
        lengths = self._whole_lengths(query, packed_seq_params)
        shape = (*query.shape[:-2], self.output_size)
        if packed_seq_params is not None:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if self._cp_group is None:
            context = _each_sequence(query, key, value, lengths, self.softmax_scale)
        else:
            context = _ContextParallelAttention.apply(query, key, value, lengths, self.softmax_scale, self._cp_group)
        return context.reshape(shape)

    def _whole_lengths(self, query: torch.Tensor, packed: PackedSeqParams | None) -> list[int]:
        ranks = 1 if self._cp_group is None else self._cp_group.size()
        total = query.shape[0] * ranks
        if packed is None:
            return [total]
        lengths = packed.cu_seqlens_q.diff().tolist()
        if sum(lengths) != total or any(length % (2 * ranks) for length in lengths if ranks > 1):
            raise ValueError(
                f"packed sequences of {lengths} tokens do not fill {total} positions, or cannot be cut "
                f"into {2 * ranks} chunks of context parallelism each"
            )
        return lengths


def _each_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """[s, b, heads, d] and [s, b, groups, d] twice to [s, b, heads, d], sequence after sequence."""
    parts = []
    for parted in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.permute(1, 2, 0, 3) for x in parted)
        context = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(context.permute(2, 0, 1, 3))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class _Block:
    """A run of this rank's queries, and keys of the whole sequences that they see."""

    queries: slice
    keys: slice
    causal: bool  # the keys end with the queries' own positions; else all keys stand before all queries


class _ContextParallelAttention(torch.autograd.Function):
    """Keys and values of all ranks are gathered, in the forward and again in the backward; queries stay.

    A run of queries attends to its own positions and to those before it in two calls of the kernel, whose results
    are merged by their logsumexp; the backward calls take the merged one, so each gives its part of the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: list[int],
        scale: float,
        group: ProcessGroup,
    ) -> torch.Tensor:
        q = _heads_first(query)
        k, v = _gathered(key, value, lengths, group)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        logsumexp = torch.empty(q.shape[:3], dtype=_accumulator(q.dtype), device=q.device)
        for own, before in _runs(lengths, group.rank(), group.size()):
            merged, lse = _attend(q, k, v, own, scale)
            if before is not None:
                part, part_lse = _attend(q, k, v, before, scale)
                both = torch.logaddexp(lse, part_lse)
                merged = merged * (lse - both).exp().unsqueeze(-1) + part * (part_lse - both).exp().unsqueeze(-1)
                lse = both
            out[:, :, own.queries], logsumexp[:, :, own.queries] = merged.to(out.dtype), lse
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.lengths, ctx.scale, ctx.group = lengths, scale, group
        return out.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logsumexp = ctx.saved_tensors
        group: ProcessGroup = ctx.group
        q, grad = _heads_first(query), _heads_first(grad_outputs[0]).contiguous()
        k, v = _gathered(key, value, ctx.lengths, group)
        dq, dk, dv = (torch.zeros(x.shape, dtype=_accumulator(x.dtype), device=x.device) for x in (q, k, v))
        for run in _runs(ctx.lengths, group.rank(), group.size()):
            for block in filter(None, run):
                mine, seen = (slice(None), slice(None), block.queries), (slice(None), slice(None), block.keys)
                parts = _flash_backward(
                    grad[mine],
                    q[mine],
                    k[seen],
                    v[seen],
                    out[mine].contiguous(),
                    logsumexp[mine].contiguous(),
                    0.0,
                    block.causal,
                    scale=ctx.scale,
                )
                dq[mine] += parts[0]
                dk[seen] += parts[1]
                dv[seen] += parts[2]
        dkey, dvalue = _scattered(dk, dv, ctx.lengths, group)
        return dq.permute(2, 0, 1, 3).to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), None, None, None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[s, b, heads, d] to [b, heads, s, d]."""
    return x.permute(1, 2, 0, 3)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: _Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's output [b, heads, queries, d] and logsumexp [b, heads, queries], both float32 at least."""
    out, logsumexp = _flash(
        q[:, :, block.queries], k[:, :, block.keys], v[:, :, block.keys], 0.0, block.causal, scale=scale
    )
    return out.to(logsumexp.dtype), logsumexp


def _runs(lengths: list[int], rank: int, ranks: int) -> list[tuple[_Block, _Block | None]]:
    """For each run of a rank's positions: the block on its diagonal, and the block before that where there is one."""
    runs = []
    start = 0
    for length in lengths:
        chunk = length // (2 * ranks)
        for place, number in enumerate((rank, 2 * ranks - 1 - rank)):
            first_query, first_key = start // ranks + place * chunk, start + number * chunk
            queries = slice(first_query, first_query + chunk)
            before = _Block(queries, slice(start, first_key), causal=False) if number else None
            runs.append((_Block(queries, slice(first_key, first_key + chunk), causal=True), before))
        start += length
    return runs


def _order(lengths: list[int], ranks: int, device: torch.device) -> torch.Tensor:
    """For each position of the whole sequences its place in the concatenation of all ranks' positions, [total]."""
    places, start, per_rank = [], 0, sum(lengths) // ranks
    for length in lengths:
        chunk = length // (2 * ranks)
        for number in range(2 * ranks):
            owner, second = (number, 0) if number < ranks else (2 * ranks - 1 - number, chunk)
            first = owner * per_rank + start // ranks + second
            places.append(torch.arange(first, first + chunk, device=device))
        start += length
    return torch.cat(places)


def _gathered(
    key: torch.Tensor, value: torch.Tensor, lengths: list[int], group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's [s, b, groups, d] twice to those of the whole sequences in order, [b, groups, total, d] twice."""
    mine = torch.stack([key, value], dim=1)
    everything = mine.new_empty((group.size() * mine.shape[0], *mine.shape[1:]))
    dist.all_gather_into_tensor(everything, mine, group=group)
    k, v = everything[_order(lengths, group.size(), key.device)].unbind(1)
    return _heads_first(k), _heads_first(v)


def _scattered(
    dk: torch.Tensor, dv: torch.Tensor, lengths: list[int], group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The way back of :func:`_gathered`: the sum over all ranks of this rank's positions, [s, b, groups, d] twice."""
    whole = torch.stack([x.permute(2, 0, 1, 3) for x in (dk, dv)], dim=1)
    everything = torch.empty_like(whole)
    everything[_order(lengths, group.size(), whole.device)] = whole
    mine = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    dist.reduce_scatter_tensor(mine, everything, group=group)
    dkey, dvalue = mine.unbind(1)
    return dkey, dvalue
