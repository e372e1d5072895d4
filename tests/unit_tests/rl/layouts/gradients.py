"""The whole gradient of a real optimizer step, gathered from whatever layout it lies in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.policy.learner import Learner
from tests.unit_tests.rl.started import Started

Tensors = dict[str, torch.Tensor]


@contextmanager
def gradients_before_steps(here: Started, learner: Learner) -> Iterator[list[Tensors]]:
    """Within the block each optimizer step first adds its gradient, by Hugging Face names, to the list.

    The gradient is complete then: summed over micro-batches and ranks, and not yet clipped.
    """
    found: list[Tensors] = []
    optimizer: Any = learner._optimizer
    step = optimizer.step

    def observed() -> Any:
        found.append(whole_gradient(here))
        return step()

    optimizer.step = observed
    try:
        yield found
    finally:
        optimizer.step = step


def whole_gradient(here: Started) -> Tensors:
    """Every parameter's ``main_grad`` through the map that exports weights. Collective."""
    chunks = here.policy.chunks
    for chunk in chunks:
        _complete_shards(chunk)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = parameter.main_grad  # type: ignore[attr-defined]
        return {name: tensor.clone() for name, tensor in here.export().items()}
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def _complete_shards(chunk: Any) -> None:
    """The distributed optimizer reduces only a rank's own shard of each bucket; this fetches the others'."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            mine = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
