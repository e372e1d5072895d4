"""Optimizer steps and log-probability passes of the policy, through Megatron's forward-backward schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from megatron.rl.data import TokenBatch
from megatron.rl.objectives import Objective
from megatron.rl.policy.head import HeadRequest, LossInputs, policy_head
from megatron.rl.policy.router_loss import count_tokens_in_routers, padding_seen_by_routers, scale_router_loss


@dataclass(frozen=True)
class HeadSettings:
    """What every pass through the head shares."""

    vocab_size: int
    temperature: float
    objective: Objective
    entropy_coeff: float = 0.0
    token_chunk: int | None = None


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step. ``requests`` hold the per-token values, on the last pipeline stage only."""

    loss: float  # of the whole mini-batch, over all data-parallel ranks; equal on all ranks
    grad_norm: float | None  # before clipping; None where Megatron skipped the step, as a gradient was not finite
    learning_rate: float  # that this step was taken with
    applied: bool  # False where Megatron skipped the step
    requests: list[HeadRequest]


class Learner:
    """Holds the policy's chunks and steps them. All calls are collective over all ranks."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        config: Any,
        groups: ProcessGroupCollection,
        head: HeadSettings,
    ) -> None:
        self.chunks = chunks
        count_tokens_in_routers(chunks)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._config = config
        self._groups = groups
        self._head = head

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self._groups.pp.rank() == self._groups.pp.size() - 1

    def update(self, batches: Sequence[TokenBatch], loss_weights: Sequence[torch.Tensor], samples: int) -> UpdateResult:
        """One optimizer step on this rank's micro-batches of a mini-batch of ``samples`` responses in all.

        ``loss_weights[i]`` [rows, positions] carries mask and global normalisation of ``batches[i]``: the objective
        is the sum over all ranks and micro-batches of weight times J. Every rank passes the same number of
        micro-batches; their shapes may differ where Megatron's configuration says so (``variable_seq_lengths``, and
        a token dispatcher that allows it).
        """
        requests = [self._request(batch, weights) for batch, weights in zip(batches, loss_weights, strict=True)]
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        # Megatron averages over micro-batches and data-parallel ranks; the weights already divide by global counts.
        scale = len(batches) * self._groups.dp.size()
        scale_router_loss(self._config, batches, self._groups, float(self._optimizer.get_loss_scale()))
        losses = self._run(batches, requests, scale=scale, forward_only=False)
        learning_rate = get_canonical_lr_for_logging(self._optimizer.param_groups)
        applied, grad_norm, _ = self._optimizer.step()
        if applied:
            self._scheduler.step(increment=samples)
        loss = self._sum_over_ranks(losses)
        return UpdateResult(loss, None if grad_norm is None else float(grad_norm), learning_rate, applied, requests)

    def logprobs(self, batches: Sequence[TokenBatch], temperature: float | None = None) -> list[HeadRequest]:
        """A pass without gradients: the requests' ``tokens`` hold log-probabilities and entropy (last stage only).

        ``temperature`` other than that of sampling may be asked for.
        """
        requests = [self._request(batch, None) for batch in batches]
        if temperature is not None:
            requests = [replace(request, temperature=temperature) for request in requests]
        with torch.no_grad():
            self._run(batches, requests, scale=1, forward_only=True)
        return requests

    def _request(self, batch: TokenBatch, loss_weights: torch.Tensor | None) -> HeadRequest:
        loss = None
        if loss_weights is not None:
            # What is left of ``update``'s factor and Megatron's own: it divides by micro-batches before the backward
            # pass, by data-parallel ranks after it.
            grad_scale = self._groups.dp_cp.size() * float(self._optimizer.get_loss_scale())
            loss = LossInputs(batch.behavior_logprobs, batch.advantages, loss_weights, batch.sequence_ids, grad_scale)
        return HeadRequest(
            targets=batch.targets,
            mask=batch.mask,
            vocab_size=self._head.vocab_size,
            temperature=self._head.temperature,
            tp_group=self._groups.tp,
            sequence_parallel=self._config.sequence_parallel,
            cp_group=self._groups.cp if self._groups.cp.size() > 1 else None,
            token_chunk=self._head.token_chunk,
            loss=loss,
            objective=self._head.objective,
            entropy_coeff=self._head.entropy_coeff,
        )

    def _run(
        self, batches: Sequence[TokenBatch], requests: Sequence[HeadRequest], *, scale: float, forward_only: bool
    ) -> list[torch.Tensor]:
        """Megatron's schedule over the micro-batches; the unscaled losses, on the last stage only."""
        work = list(zip(batches, requests, strict=True))
        iterators: Any = [iter(work) for _ in self.chunks]
        rows, positions = batches[0].tokens.shape
        return get_forward_backward_func()(
            forward_step_func=lambda data, model: _forward_step(data, model, scale, self._groups),
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=positions * self._groups.cp.size(),
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    def _sum_over_ranks(self, losses: list[torch.Tensor]) -> float:
        """The mini-batch's loss on every rank. One tensor-parallel rank's loss is the group's."""
        device = next(self.chunks[0].parameters()).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.is_last_stage:
            total += torch.stack(losses).double().sum()
            torch.distributed.all_reduce(total, group=self._groups.dp_cp)
        if self._groups.pp.size() > 1:
            last = torch.distributed.get_global_rank(self._groups.pp, self._groups.pp.size() - 1)
            torch.distributed.broadcast(total, src=last, group=self._groups.pp)
        return total.item()


def _forward_step(
    data: Iterator[tuple[TokenBatch, HeadRequest]], model: Any, scale: float, groups: ProcessGroupCollection
) -> tuple[Any, Any]:
    batch, request = next(data)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        output_processor=policy_head,
        output_processor_context=request,
        packed_seq_params=_packed(batch),
        padding_mask=padding_seen_by_routers(batch, unwrap_model(model), groups),
    )

    def loss_of(loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return loss * scale, loss.detach()

    return output, loss_of


def _packed(batch: TokenBatch) -> PackedSeqParams | None:
    """The bounds of packed sequences, padding counted as theirs: it stands after the tokens, which do not see it."""
    if batch.cu_seqlens is None:
        return None
    longest = int(batch.cu_seqlens.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def unwrapped(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The GPTModels inside Megatron's wrappers."""
    return [unwrap_model(chunk) for chunk in chunks]
