"""Two things that Megatron's optimizers cannot do by themselves when they are loaded from a checkpoint."""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What a run may set otherwise than the one that it goes on from: the flags decide, and not the checkpoint.
_OF_ADAM = ("betas", "eps")
_OF_SCHEDULES = ("max_lr", "min_lr")


@contextlib.contextmanager
def optimizer_can_be_loaded(optimizer: Any, args: argparse.Namespace) -> Iterator[None]:
    """Within the block Megatron may load ``optimizer``; afterwards it has the settings of this run's flags.

    With ``--use-checkpoint-opt-param-scheduler`` the settings of schedules are the checkpoint's.
    """
    parts = [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]
    names = _OF_ADAM if args.use_checkpoint_opt_param_scheduler else (*_OF_ADAM, *_OF_SCHEDULES)
    with _rates_may_differ(), _settings_kept(parts, names), _torch_adam_can_be_loaded(parts):
        yield


@contextlib.contextmanager
def _rates_may_differ() -> Iterator[None]:
    """Megatron finds a group of parameters in the checkpoint by its learning rates, so that none is found where a run
    goes on at another. Whether a group has the run's own rates, or others, tells groups apart as well."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    whole = optimizer.param_group_identifier_keys
    others = tuple(key for key in whole if key not in _OF_SCHEDULES)
    modules: tuple[Any, ...] = (optimizer, distrib_optimizer)
    for module in modules:
        module.param_group_identifier_keys = (*others, "default_config")
    try:
        yield
    finally:
        for module in modules:
            module.param_group_identifier_keys = whole


@contextlib.contextmanager
def _settings_kept(parts: list[Any], names: tuple[str, ...]) -> Iterator[None]:
    kept = [[{name: group[name] for name in names} for group in part.optimizer.param_groups] for part in parts]
    yield
    for part, groups in zip(parts, kept, strict=True):
        for group, settings in zip(part.optimizer.param_groups, groups, strict=True):
            group.update(settings)


@contextlib.contextmanager
def _torch_adam_can_be_loaded(parts: list[Any]) -> Iterator[None]:
    """Within the block Megatron's distributed optimizer loads into torch's own Adam.

    It uses that one where Transformer Engine and apex are missing, and then stumbles over the counter of steps: it
    asks for it before there is one, takes it for a tensor of the checkpoint, and loads one counter for all parameters,
    so that each of them would count it up.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parts = [
        part
        for part in parts
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam)
    ]
    for part in parts:
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            if not part.optimizer.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                part.optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
        part._set_main_param_and_optimizer_states = _without_step(part._set_main_param_and_optimizer_states)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states
    for part in parts:
        for state in part.optimizer.state.values():
            state["step"] = state["step"].clone()


def _without_step(set_tensors: Callable) -> Callable:
    return lambda parameter, tensors: set_tensors(parameter, {**tensors, "step": None})
