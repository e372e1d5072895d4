"""What a run leaves behind: Megatron's distributed checkpoint, and a Hugging Face folder."""

import argparse
import contextlib
import json
import os
import queue
from collections.abc import Callable, Iterator
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
            json.dump({"state": state, "expert_model_parallel_size": args.expert_model_parallel_size}, file)
    _use_plain_results_queue()
    megatron_save(iteration, policy.chunks, policy.optimizer, policy.scheduler, 0)
    torch.distributed.barrier()
    return folder


def _use_plain_results_queue() -> None:
    """Writers are threads of this process; Megatron would start a helper process for each rank's queue of results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def load_checkpoint(args: argparse.Namespace, policy: Policy) -> tuple[int, dict[str, Any]]:
    """Loads the newest complete checkpoint of ``--load`` (or that of ``--ckpt-step``). Collective.

    The layout may be another than the saved one, but for expert parallelism, which is on in both or in neither.
    Returns its iteration and the run's state. Raises :class:`CheckpointError` where there is none, or one that is
    damaged, of another model, or of a layout that cannot be taken over.
    """
    from megatron.training.checkpointing import load_checkpoint as megatron_load

    path = os.path.join(_newest_checkpoint(args), _STATE_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path} is missing: no complete checkpoint of this program; choose another by --ckpt-step ITERATION, or "
            f"start from a Hugging Face folder by --hf-model"
        )
    with open(path) as file:
        saved = json.load(file)
    _check_experts(args, saved["expert_model_parallel_size"])
    # Megatron copies into views of float32 parameters, which autograd forbids outside no_grad.
    with torch.no_grad(), _torch_adam_can_be_loaded(policy.optimizer):
        try:
            iteration, _ = megatron_load(policy.chunks, policy.optimizer, policy.scheduler)
        except CheckpointException as error:  # on all ranks alike, with the ranks' own stack traces as its text
            reason = str(error).strip().splitlines()[-1]
            raise CheckpointError(
                f"--load {args.load}: damaged, or not a checkpoint of the model in --hf-model: {reason}"
            ) from error
    return iteration, saved["state"]


def _check_experts(args: argparse.Namespace, saved: int) -> None:
    """With expert parallelism Megatron has an optimizer of its own for the experts, whose state stands apart."""
    here = args.expert_model_parallel_size
    if args.num_experts and (saved > 1) != (here > 1):
        raise CheckpointError(
            f"--load {args.load}: saved with --expert-model-parallel-size {saved}, and its optimizer cannot be taken "
            f"over to {here}; keep it, or start from the run's Hugging Face export by --hf-model"
        )


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


@contextlib.contextmanager
def _torch_adam_can_be_loaded(optimizer: Any) -> Iterator[None]:
    """Within the block Megatron's distributed optimizer loads into torch's own Adam.

    It uses that one where Transformer Engine and apex are missing, and then stumbles over the counter of steps: it
    asks for it before there is one, takes it for a tensor of the checkpoint, and loads one counter for all parameters,
    so that each of them would count it up.
    """
    parts = [
        part
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if isinstance(getattr(part, "optimizer", None), torch.optim.Adam)
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
