"""What a compared path is, and those that need no peer: ours, plain torch and megatron-core's."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util

import torch
import torch.distributed as dist

from loss_benchmark.inputs import Answer, Inputs
from megatron.rl.objectives import get_objective
from megatron.rl.ops import fused_linear_policy_loss

# (hidden, weight, inputs) -> (loss, log-probabilities or None); hidden and weight are leaves that want gradients.
Forward = Callable[[torch.Tensor, torch.Tensor, Inputs], tuple[torch.Tensor, torch.Tensor | None]]


class MissingPeer(Exception):
    """A path that cannot be measured here. The message says why and, where it helps, how to mend it."""


@dataclass(frozen=True)
class Place:
    """Where the paths run."""

    device: torch.device
    dtype: torch.dtype
    group: dist.ProcessGroup  # of this one rank


@dataclass(frozen=True)
class LossPath:
    """One way from hidden states to the policy loss and its gradients."""

    name: str
    function: str  # as the peer calls it
    package: str  # distribution it comes from
    keeps_logits: bool  # tokens x vocabulary in memory at once
    gemm_work: int  # in tokens x hidden x vocabulary
    note: str  # what it lacks
    prepare: Callable[[Place], Forward]  # imports the peer; raises MissingPeer where it cannot run

    @property
    def version(self) -> str:
        """Of the installed package; empty where there is none."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return ""


def require(module: str, install: str) -> None:
    """Raises :class:`MissingPeer` unless that top-level module is there; ``install`` is the command that brings it."""
    if util.find_spec(module) is None:
        raise MissingPeer(f"not installed; install it with: {install}")


def require_gpu(place: Place, what: str) -> None:
    """Raises :class:`MissingPeer` on a CPU."""
    if place.device.type != "cuda":
        raise MissingPeer(f"{what} needs a GPU")


def policy_gradient_loss(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """- sum(loss_weights * r * A), by autograd, for paths that end at log-probabilities."""
    return -(inputs.loss_weights * (logprobs - inputs.behavior_logprobs).exp() * inputs.advantages).sum()


def answer(forward: Forward, inputs: Inputs) -> Answer:
    """Forward and backward of one path, with gradients for hidden states and weight."""
    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()
    loss, logprobs = forward(hidden, weight, inputs)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))
    return Answer(grad_hidden, grad_weight, None if logprobs is None else logprobs.detach())


class OwnLoss:
    """Ours; notes how many tokens its chunks have, which is what the objective is called with."""

    def __init__(self, token_chunk: int | None) -> None:
        self._token_chunk = token_chunk
        self._objective: Callable[..., tuple[torch.Tensor, torch.Tensor]] = get_objective("pg")
        self.largest_chunk = 0

    def __call__(
        self, hidden: torch.Tensor, weight: torch.Tensor, inputs: Inputs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = fused_linear_policy_loss(
            hidden,
            weight,
            inputs.target_ids,
            inputs.behavior_logprobs,
            inputs.advantages,
            inputs.loss_weights,
            self._watched,
            vocab_size=inputs.vocab_size,
            token_chunk=self._token_chunk,
        )
        return output.loss, output.logprobs

    def _watched(
        self, logp: torch.Tensor, logmu: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.largest_chunk = max(self.largest_chunk, logp.numel())
        return self._objective(logp, logmu, advantages)


def own_paths(token_chunk: int) -> list[LossPath]:
    """Ours with the chunk it chooses, and with ``token_chunk``."""

    def path(name: str, chunk: int | None) -> LossPath:
        function = "megatron.rl.ops.fused_linear_policy_loss"
        note = "gives entropy, TV distance and ratio of every token as well"
        return LossPath(name, function, "megatron-drpo", False, 6, note, lambda place: OwnLoss(chunk))

    return [path("ours", None), path(f"ours-chunk-{token_chunk}", token_chunk)]


def _torch(place: Place) -> Forward:
    def forward(hidden, weight, inputs):
        log_pi = (hidden @ weight.t()).float().log_softmax(-1)
        logprobs = log_pi.gather(1, inputs.target_ids.unsqueeze(1)).squeeze(1)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _megatron_core(place: Place) -> Forward:
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    def forward(hidden, weight, inputs):
        logprobs = -vocab_parallel_cross_entropy(hidden @ weight.t(), inputs.target_ids, tp_group=place.group)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _megatron_core_fused(place: Place) -> Forward:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    def forward(hidden, weight, inputs):
        logprobs = -fused_vocab_parallel_cross_entropy(hidden @ weight.t(), inputs.target_ids, place.group)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


BUILT_IN = (
    LossPath(
        "torch",
        "torch.log_softmax of float32 logits",
        "torch",
        keeps_logits=True,
        gemm_work=6,
        note="no entropy, no tensor parallelism, no chunks",
        prepare=_torch,
    ),
    LossPath(
        "mcore",
        "megatron.core.tensor_parallel.vocab_parallel_cross_entropy",
        "megatron-core",
        keeps_logits=True,
        gemm_work=6,
        note="no entropy, no chunks; three collectives",
        prepare=_megatron_core,
    ),
    LossPath(
        "mcore-fused",
        "megatron.core.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
        "megatron-core",
        keeps_logits=True,
        gemm_work=6,
        note="no entropy, no chunks; rounds the logits' gradient to bfloat16, for float32 inputs too",
        prepare=_megatron_core_fused,
    ),
)
