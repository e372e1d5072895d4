"""The head of the policy: hidden states to the policy-gradient loss or to log-probabilities, never to logits.

:func:`policy_head` is the function that ``GPTModel.forward(..., output_processor=...)`` calls in place of
its language-model head; :class:`HeadRequest` is the ``output_processor_context`` that tells it what to do.
"""

from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch.distributed import ProcessGroup

from megatron.rl.objectives import Objective
from megatron.rl.ops import fused_linear_logprobs, fused_linear_policy_loss


@dataclass
class LossInputs:
    """Per-token inputs of the objective, each [rows, positions]; float32 but for the ids."""

    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor  # mask and normalisation; zero where no token is trained
    sequence_ids: torch.Tensor  # int64, which response of the micro-batch
    grad_scale: float | None = None  # the gradient that the loss will receive, where that is known beforehand


@dataclass
class HeadRequest:
    """What the head computes for one micro-batch, and where it leaves the per-token values.

    With ``loss`` the head returns the scalar loss; without it the forward only gives log-probabilities and
    entropy. ``tokens`` are the per-token results by name, each [rows, positions] float32, detached.
    """

    targets: torch.Tensor  # [rows, positions] int64, the token that each position predicts
    mask: torch.Tensor  # [rows, positions] bool, positions whose target was sampled by the policy
    vocab_size: int
    temperature: float
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    cp_group: ProcessGroup | None = None  # over which a response's positions are spread
    token_chunk: int | None = None
    loss: LossInputs | None = None
    objective: Objective | None = None
    entropy_coeff: float = 0.0
    tokens: dict[str, torch.Tensor] = field(default_factory=dict)


class _Projection(TypedDict):
    vocab_size: int
    temperature: float
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    token_chunk: int | None


def policy_head(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    context: HeadRequest,
    **_: Any,
) -> torch.Tensor:
    """Computes ``context``'s loss (a scalar with gradient), or zero after a pass for log-probabilities.

    ``hidden_states`` is Megatron's [sequence, batch, hidden_size]; with sequence parallelism this rank's
    slice of the sequence. ``output_weight`` is the embedding's where it is tied, else None.
    """
    weight: Any = output_layer.weight if output_weight is None else output_weight
    hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
    targets = _sequence_first(context.targets)
    shared: _Projection = {
        "vocab_size": context.vocab_size,
        "temperature": context.temperature,
        "tp_group": context.tp_group,
        "sequence_parallel": context.sequence_parallel,
        "token_chunk": context.token_chunk,
    }
    shape = context.targets.shape
    if context.loss is None:
        # Masked positions carry whatever padding is there; any id inside the vocabulary serves.
        targets = torch.where(_sequence_first(context.mask), targets, 0)
        scored: Any = fused_linear_logprobs(hidden, weight, targets, return_entropy=True, **shared)
        context.tokens = {
            "logprobs": _batch_first(scored.logprobs, shape),
            "entropy": _batch_first(scored.entropy, shape),
        }
        return hidden_states.new_zeros((), dtype=torch.float32)
    inputs, objective = context.loss, context.objective
    if objective is None:
        raise ValueError("a head request with loss inputs needs its objective")
    output = fused_linear_policy_loss(
        hidden,
        weight,
        targets,
        _sequence_first(inputs.behavior_logprobs),
        _sequence_first(inputs.advantages),
        _sequence_first(inputs.loss_weights),
        objective,
        sequence_ids=_sequence_first(inputs.sequence_ids) if objective.needs == "sequence" else None,
        sequence_group=context.cp_group if objective.needs == "sequence" else None,
        grad_scale=inputs.grad_scale,
        entropy_coeff=context.entropy_coeff,
        **shared,
    )
    context.tokens = {
        name: _batch_first(getattr(output, name), shape) for name in ("logprobs", "entropy", "tv", "ratio", "weight")
    }
    return output.loss


def _sequence_first(x: torch.Tensor) -> torch.Tensor:
    """[rows, positions] to the order of Megatron's flattened [sequence, batch]."""
    return x.transpose(0, 1).reshape(-1)


def _batch_first(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return x.detach().view(shape[1], shape[0]).transpose(0, 1)
