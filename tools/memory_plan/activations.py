"""What a layer keeps of its forward pass for the backward pass, in bytes a token of one rank.

The local layers' terms were read from the tensors that autograd saves, one by one, and are tested against them.
Transformer Engine's fuse a norm with the linear layer after it and the two halves of SwiGLU with each other, so they
keep fewer copies; no GPU has measured those terms.
"""

import argparse
from dataclasses import dataclass

_INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Kept:
    """Bytes a token that one layer keeps, by part."""

    norms: float
    attention: float
    mlp: float  # or experts

    @property
    def all(self) -> float:
        return self.norms + self.attention + self.mlp


class LayerActivations:
    """The terms of one model in one layout.

    Args:
        args: Megatron's, validated.
        element: bytes of an activation's element.
        rows: sequences side by side in a micro-batch; 1 where they are packed.
        local: whether the layers are megatron-core's local ones.
    """

    def __init__(self, args: argparse.Namespace, element: int, rows: int, *, local: bool) -> None:
        self._args = args
        self._rows = rows
        self._element = element
        self._local = local
        self._tp = args.tensor_model_parallel_size
        # Under sequence parallelism each rank keeps its part of what is not cut by tensor parallelism.
        self._slice = 1 / self._tp if args.sequence_parallel else 1.0

    def stored(self, *, moe: bool) -> float:
        """Bytes a token that a layer keeps until its backward pass, after recomputation has taken its part away."""
        if self._args.recompute_granularity == "full":
            return self._args.hidden_size * self._element * self._slice / self._args.recompute_num_layers
        return self._kept(moe).all

    def passing(self, *, moe: bool) -> float:
        """Bytes a token of one layer while its backward pass runs: what was recomputed, and gradients on their way.

        These are the residual stream's, the branch's, and those of the MLP's inner tensors, which are the widest.
        """
        recomputed = 0.0
        if self._args.recompute_granularity == "full":
            recomputed = self._args.recompute_num_layers * (self._complete(moe).all - self.stored(moe=moe))
        elif self._args.recompute_granularity == "selective":
            recomputed = self._complete(moe).all - self.stored(moe=moe)
        return recomputed + 2 * self._args.hidden_size * self._element * self._slice + self._widest(moe)

    def last_norm(self) -> float:
        """Bytes a token of the norm after the layers; the head keeps its input's gradient in the place of its input."""
        return self._norm(self._args.hidden_size)

    def _kept(self, moe: bool) -> Kept:
        kept = self._complete(moe)
        if self._args.recompute_granularity != "selective":
            return kept
        modules = set(self._args.recompute_modules or ())
        gone = (moe and "moe" in modules) or (not moe and "mlp" in modules)
        return Kept(kept.norms, kept.attention, 0.0 if gone else kept.mlp)

    def _complete(self, moe: bool) -> Kept:
        norms = 2 * self._norm(self._args.hidden_size)
        return Kept(norms, self._attention(), self._experts() if moe else self._plain_mlp())

    def _norm(self, width: int) -> float:
        """Its input, the reciprocal root, and its output, the next product's operand; the local one's copies too."""
        if not self._local:
            return (2 * width * self._element + 4) * self._slice
        return (4 * width + 4 + 2 * width * self._element) * self._slice

    def _attention(self) -> float:
        args, element = self._args, self._element
        heads, groups = args.num_attention_heads / self._tp, max(1.0, args.num_query_groups / self._tp)
        query, key = heads * args.kv_channels, groups * args.kv_channels
        kept = (query + 2 * key) * element + (query + key) * element + 4 * heads + query * element
        if args.qk_layernorm:
            kept += 4 * (heads + groups) + (query + key) * element
            if self._local:  # in float32 a key needs no copy
                kept += 4 * (query + (key if element < 4 else 0))
        if self._local:
            kept += 4 * args.kv_channels * element / self._rows  # sines and cosines, for query and key
            if args.context_parallel_size > 1:
                kept += query * element  # the output by heads, beside that by positions
        return kept

    def _plain_mlp(self) -> float:
        """Gate and up, and SwiGLU's output; the local layers keep the gate's sigmoid and product too."""
        return (5 if self._local else 3) * self._args.ffn_hidden_size / self._tp * self._element

    def _experts(self) -> float:
        """Of the tokens that experts spread evenly bring to this rank."""
        args, element, top_k = self._args, self._element, self._args.moe_router_topk
        etp = args.expert_tensor_parallel_size or self._tp
        # Tensor-parallel ranks without sequence parallelism would hold the same tokens; experts have it always on.
        share = self._slice * etp
        permuted = top_k * args.hidden_size * element
        inner = (6 if self._local else 3) * top_k * args.moe_ffn_hidden_size / etp * element
        # probabilities, the experts' numbers, and (local layers) the index that gathers and scatters whole rows
        routing = top_k * (_INDEX + 4 + 4) + (top_k * 3 * _INDEX if self._local else 0)
        if args.moe_router_pre_softmax:
            routing += 4 * args.num_experts
        return (permuted + inner) * share + routing * self._slice

    def _widest(self, moe: bool) -> float:
        if moe:
            etp = self._args.expert_tensor_parallel_size or self._tp
            wide = self._args.moe_router_topk * (2 * self._args.moe_ffn_hidden_size / etp + self._args.hidden_size)
            return wide * self._slice * etp * self._element
        return 3 * self._args.ffn_hidden_size / self._tp * self._element
