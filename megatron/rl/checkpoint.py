"""What a run leaves behind: Megatron's distributed checkpoint, and a Hugging Face folder."""

import argparse
import json
import os
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron.rl.errors import CheckpointError
from megatron.rl.setup import Policy

_STATE_FILE = "rl_state.json"


def save_checkpoint(args: argparse.Namespace, policy: Policy, iteration: int, state: dict[str, Any]) -> str:
    """Saves weights, optimizer and random states by megatron-core, and the run's own ``state``. Collective.

    Returns the checkpoint's folder. Megatron's tracker file names it last of all, once it is complete.
    """
    from megatron.training.checkpointing import get_checkpoint_name
    from megatron.training.checkpointing import save_checkpoint as megatron_save

    folder = get_checkpoint_name(args.save, iteration, return_base_dir=True)
    if torch.distributed.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, _STATE_FILE), "w") as file:
            json.dump(state, file)
    megatron_save(iteration, policy.chunks, policy.optimizer, policy.scheduler, 0)
    torch.distributed.barrier()
    return folder


def load_checkpoint(args: argparse.Namespace, policy: Policy) -> tuple[int, dict[str, Any]]:
    """Loads the newest complete checkpoint of ``--load`` (or that of ``--ckpt-step``), in any layout. Collective.

    Returns its iteration and the run's state. Raises :class:`CheckpointError` where there is none, or one that is
    damaged or of another model.
    """
    from megatron.training.checkpointing import load_checkpoint as megatron_load

    path = os.path.join(_newest_checkpoint(args), _STATE_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path} is missing: no complete checkpoint of this program; choose another by --ckpt-step ITERATION, or "
            f"start from a Hugging Face folder by --hf-model"
        )
    # Megatron copies into views of float32 parameters, which autograd forbids outside no_grad.
    with torch.no_grad():
        _allocate_adam_states(policy.optimizer)
        try:
            iteration, _ = megatron_load(policy.chunks, policy.optimizer, policy.scheduler)
        except CheckpointException as error:  # on all ranks alike, with the ranks' own stack traces as its text
            reason = str(error).strip().splitlines()[-1]
            raise CheckpointError(
                f"--load {args.load}: damaged, or not a checkpoint of the model in --hf-model: {reason}"
            ) from error
        _separate_adam_steps(policy.optimizer)
    with open(path) as file:
        return iteration, json.load(file)


def _newest_checkpoint(args: argparse.Namespace) -> str:
    from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename

    tracker = get_checkpoint_tracker_filename(args.load)
    if not os.path.isfile(tracker):
        raise CheckpointError(f"--load {args.load}: no Megatron checkpoint there ({os.path.basename(tracker)})")
    with open(tracker) as file:
        named = file.read().strip()
    if not named.isdecimal():
        raise CheckpointError(f"{tracker}: must hold the iteration of a checkpoint (got {named[:40]!r})")
    return get_checkpoint_name(args.load, args.ckpt_step or int(named), return_base_dir=True)


def _torch_adams(optimizer: Any) -> list[torch.optim.Adam]:
    """torch's own Adams inside Megatron's optimizer: what it uses where Transformer Engine and apex are missing."""
    inner = [getattr(part, "optimizer", None) for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [adam for adam in inner if isinstance(adam, torch.optim.Adam)]


def _allocate_adam_states(optimizer: Any) -> None:
    """An Adam that has not stepped has no state, and Megatron's loading asks its state for the number of steps."""
    for adam in _torch_adams(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.zeros(()), **moments}


def _separate_adam_steps(optimizer: Any) -> None:
    """Megatron loads one step counter into all parameters' states, and each of them would count it up."""
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
