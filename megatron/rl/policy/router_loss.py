"""The router's z-loss (arXiv 2202.08906, eq. 5) as a mean over all tokens of a mini-batch, however that is cut.

Megatron takes the mean over a micro-batch and then over micro-batches and ranks, so that a token counts the more the
fewer share its micro-batch. Its routers can weight each micro-batch by its tokens instead, padding left out; what is
left to divide by, the mini-batch's tokens, goes into the scale of their gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from torch import distributed as dist

from megatron.rl.data import TokenBatch


def count_tokens_in_routers(chunks: Sequence[torch.nn.Module]) -> None:
    """Has every router weight its loss by the tokens of the micro-batch that are no padding."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.calculate_per_token_loss = True


def scale_router_loss(
    config: Any, batches: Sequence[TokenBatch], groups: ProcessGroupCollection, loss_scale: float
) -> None:
    """Sets the gradient's scale for an update on this rank's ``batches``. Collective where there is a z-loss.

    Megatron multiplies by the context-parallel size and divides by micro-batches before the backward pass, and by
    data- and context-parallel ranks after it.
    """
    if config.num_moe_experts is None or not config.moe_z_loss_coeff:
        return
    tokens = torch.stack([(~batch.is_padding).sum() for batch in batches]).sum().double()
    dist.all_reduce(tokens, group=groups.dp_cp)
    scale = loss_scale * len(batches) * groups.dp.size() / max(1.0, tokens.item())
    config.moe_grad_scale_func = lambda: torch.tensor(scale, dtype=torch.float32, device=tokens.device)


def padding_seen_by_routers(batch: TokenBatch, model: Any, groups: ProcessGroupCollection) -> torch.Tensor | None:
    """Where ``batch`` is padding, [rows, positions]: as ``GPTModel.forward`` takes it on this pipeline stage.

    The first stage slices it for sequence parallelism itself; later ones take it as the router sees it.
    """
    config = model.config
    if config.num_moe_experts is None:
        return None
    if model.pre_process or not config.sequence_parallel:
        return batch.is_padding
    return batch.is_padding.chunk(groups.tp.size(), dim=1)[groups.tp.rank()].contiguous()
