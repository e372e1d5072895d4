"""Puts exported tensors into a ``transformers`` model that lives in this process."""

import re
from collections.abc import Iterable

import torch

from megatron.rl.errors import CheckpointError

# transformers 5 stacks a layer's experts into two parameters; files keep one tensor for each projection.
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<projection>gate|up|down)_proj\.weight")


@torch.no_grad()
def load_into_hf_model(hf_model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copies hub-named tensors into the model's parameters, whatever its layout in memory, in place.

    Values are cast to the parameters' dtype and moved to their device. The iterable is consumed to its end.

    Raises:
        CheckpointError: a tensor without a place in the model or of another shape, one given twice, or a parameter
            that the tensors leave unfilled.
    """
    parameters = dict(hf_model.named_parameters())
    unfilled = {name: parameter.numel() for name, parameter in parameters.items()}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name} was given twice to {type(hf_model).__name__}")
        seen.add(name)
        owner, target = _place(parameters, name, hf_model)
        if target.shape != tensor.shape:
            raise CheckpointError(
                f"tensor {name} of shape {tuple(tensor.shape)} does not fit {owner} of {type(hf_model).__name__}, "
                f"which takes {tuple(target.shape)} there"
            )
        target.copy_(tensor)
        unfilled[owner] -= target.numel()
    if missing := [name for name, count in unfilled.items() if count]:
        raise CheckpointError(
            f"{type(hf_model).__name__} was not given all of parameter {missing[0]} ({len(missing)} parameters in all)"
        )


def _place(parameters: dict[str, torch.nn.Parameter], name: str, hf_model: torch.nn.Module) -> tuple[str, torch.Tensor]:
    """The parameter that holds the tensor called ``name``, and the part of it that does."""
    if name in parameters:
        return name, parameters[name].data
    if found := _EXPERT.fullmatch(name):
        index, projection = int(found["index"]), found["projection"]
        owner = f"{found['experts']}.{'down_proj' if projection == 'down' else 'gate_up_proj'}"
        if owner in parameters and index < parameters[owner].shape[0]:
            expert = parameters[owner].data[index]
            if projection == "down":
                return owner, expert
            gate, up = expert.chunk(2, dim=0)
            return owner, gate if projection == "gate" else up
    raise CheckpointError(f"tensor {name} has no place in {type(hf_model).__name__}")
