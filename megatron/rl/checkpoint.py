"""What a run leaves behind: Megatron's distributed checkpoint, and a Hugging Face folder."""

import argparse
import json
import os
from typing import Any

import torch

from megatron.rl.errors import CheckpointError
from megatron.rl.setup import Policy

_STATE_FILE = "rl_state.json"


def save_checkpoint(args: argparse.Namespace, policy: Policy, iteration: int, state: dict[str, Any]) -> str:
    """Saves weights, optimizer and random states by megatron-core, and the run's own ``state``. Collective.

    Returns the checkpoint's folder. Megatron's tracker file names it only once it is complete.
    """
    from megatron.training.checkpointing import get_checkpoint_name
    from megatron.training.checkpointing import save_checkpoint as megatron_save

    megatron_save(iteration, policy.chunks, policy.optimizer, policy.scheduler, 0)
    folder = get_checkpoint_name(args.save, iteration, return_base_dir=True)
    if torch.distributed.get_rank() == 0:
        with open(os.path.join(folder, _STATE_FILE), "w") as file:
            json.dump(state, file)
    torch.distributed.barrier()
    return folder


def load_checkpoint(args: argparse.Namespace, policy: Policy) -> tuple[int, dict[str, Any]]:
    """Loads the newest complete checkpoint of ``--load``, in any layout. Collective.

    Returns its iteration and the run's state. Raises :class:`CheckpointError` where there is none.
    """
    from megatron.training.checkpointing import (
        checkpoint_exists,
        get_checkpoint_name,
    )
    from megatron.training.checkpointing import (
        load_checkpoint as megatron_load,
    )

    if not checkpoint_exists(args.load):
        raise CheckpointError(f"--load {args.load}: no Megatron checkpoint there (latest_checkpointed_iteration.txt)")
    # Megatron copies into views of float32 parameters, which autograd forbids outside no_grad.
    with torch.no_grad():
        iteration, _ = megatron_load(policy.chunks, policy.optimizer, policy.scheduler)
    path = os.path.join(get_checkpoint_name(args.load, iteration, return_base_dir=True), _STATE_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing: not a checkpoint of this program; use its --hf-model export instead")
    with open(path) as file:
        return iteration, json.load(file)
