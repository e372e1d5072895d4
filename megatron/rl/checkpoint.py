"""What a run leaves behind: Megatron's distributed checkpoint, and a Hugging Face folder."""

import argparse
import contextlib
import json
import os
import queue
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron.rl.config import TrainerConfig
from megatron.rl.errors import CheckpointError
from megatron.rl.optimizer_loading import optimizer_can_be_loaded
from megatron.rl.run_log import CHECKPOINTS_FOLDER
from megatron.rl.setup import Policy

_LONGEST_REASON = 300  # characters; megatron-core lists every tensor that it misses
_STATE_FILE = "rl_state.json"
_STATE_KEYS = {"run", "iteration", "step", "prompts", "expert_model_parallel_size", "optimizer"}


@dataclass(frozen=True)
class Start:
    """Where a run begins: at nothing, or behind the checkpoint that it goes on from."""

    run: str  # this run's name; one that goes on in the same folder of checkpoints keeps its own
    iteration: int = 0  # optimizer steps behind
    step: int = 0  # rollout batches behind
    prompts: dict[str, Any] | None = None  # where ``PromptSampler`` was; None for the first prompt
    goes_on: bool = False  # from the checkpoints that it also saves to


def read_start(args: argparse.Namespace, trainer: TrainerConfig) -> Start:
    """What ``--load`` (and ``--ckpt-step``) asks for, without its tensors. ``--finetune`` takes weights and no more.

    Raises :class:`CheckpointError` where there is no checkpoint, or one whose progress does not fit this run's.
    """
    if args.load is None:
        return Start(uuid.uuid4().hex)
    saved = _read_state(args)
    if args.finetune:
        return Start(uuid.uuid4().hex)
    _check_progress(args.load, saved["iteration"], trainer)
    goes_on = os.path.realpath(args.load) == os.path.realpath(args.save)
    run = saved["run"] if goes_on else uuid.uuid4().hex
    return Start(run, saved["iteration"], saved["step"], saved["prompts"], goes_on)


def _read_state(args: argparse.Namespace) -> dict[str, Any]:
    path = os.path.join(_newest_checkpoint(args), _STATE_FILE)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path} is missing: no complete checkpoint of this program; choose another by --ckpt-step ITERATION, or "
            f"start from a Hugging Face folder by --hf-model"
        )
    with open(path) as file:
        text = file.read()
    try:
        saved = json.loads(text)
        missing = sorted(_STATE_KEYS - saved.keys())
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); choose another checkpoint by --ckpt-step") from error
    if missing:
        raise CheckpointError(f"{path}: has no {', '.join(missing)}; it is of another version of this program")
    if not (args.no_load_optim or args.finetune):
        _check_optimizer(args, saved)
    return saved


def _check_progress(load: str, iteration: int, trainer: TrainerConfig) -> None:
    """Intervals and the run's end are met only from a multiple of the steps taken on a batch."""
    if iteration > trainer.train_iters:
        raise CheckpointError(
            f"--load {load}: {iteration} optimizer steps are behind it, and --train-iters {trainer.train_iters} asks "
            "for fewer in all; raise it, or choose an earlier checkpoint by --ckpt-step"
        )
    if iteration % trainer.iterations_per_step:
        raise CheckpointError(
            f"--load {load}: {iteration} optimizer steps are behind it, no multiple of the "
            f"{trainer.iterations_per_step} taken on each rollout batch now; keep the sizes of a batch "
            "(--grpo-prompts-per-step, --grpo-group-size, --grpo-iterations, --global-batch-size), or choose another "
            "checkpoint by --ckpt-step"
        )


def save_checkpoint(args: argparse.Namespace, policy: Policy, state: Start) -> str:
    """Saves weights, optimizer and random states by megatron-core, and the run's own ``state``. Collective.

    Returns the checkpoint's folder. Megatron's tracker file names it last of all, once it is complete.
    """
    from megatron.training.checkpointing import get_checkpoint_name
    from megatron.training.checkpointing import save_checkpoint as megatron_save

    folder = get_checkpoint_name(args.save, state.iteration, return_base_dir=True)
    if torch.distributed.get_rank() == 0:
        os.makedirs(folder)  # never over another checkpoint: a killed run would leave a mixture of the two
        with open(os.path.join(folder, _STATE_FILE), "w") as file:
            json.dump(_state_of(args, state), file)
    _use_plain_results_queue()
    megatron_save(state.iteration, policy.chunks, policy.optimizer, policy.scheduler, 0)
    torch.distributed.barrier()
    return folder


def _state_of(args: argparse.Namespace, state: Start) -> dict[str, Any]:
    return {
        "run": state.run,
        "iteration": state.iteration,
        "step": state.step,
        "prompts": state.prompts,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "optimizer": None if args.no_save_optim else _kind_of_optimizer(args),
    }


def drop_later_checkpoints(args: argparse.Namespace, iteration: int) -> str | None:
    """Makes ``iteration`` the newest checkpoint in ``--save`` again, for a run that goes on from it. On one rank only.

    What was saved later, or begun to be saved, moves to a folder of its own, so that a run that is killed now does
    not go on from it. Returns a line that says so, None where there is nothing later.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    tracker = get_checkpoint_tracker_filename(args.save)
    with open(f"{tracker}.part", "w") as file:
        file.write(str(iteration))
    os.replace(f"{tracker}.part", tracker)
    found = ((path, re.fullmatch(r"iter_(\d+)", path.name)) for path in Path(args.save).iterdir())
    later = [path for path, name in found if name and int(name[1]) > iteration]
    if not later:
        return None
    target = Path(args.save) / time.strftime("abandoned-%Y-%m-%dT%H-%M-%S")
    target.mkdir(exist_ok=True)
    for path in later:
        path.rename(target / path.name)
    return f"{len(later)} checkpoint(s) after optimizer step {iteration} are now in {target}"


def _use_plain_results_queue() -> None:
    """Writers are threads of this process; Megatron would start a helper process for each rank's queue of results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def load_checkpoint(args: argparse.Namespace, policy: Policy) -> None:
    """Loads the newest complete checkpoint of ``--load`` (or that of ``--ckpt-step``). Collective.

    The layout may be another than the saved one, but for expert parallelism, which is on in both or in neither.
    Raises :class:`CheckpointError` where there is none, or one that is damaged, of another model, or of a layout that
    cannot be taken over.
    """
    from megatron.training.checkpointing import load_checkpoint as megatron_load

    saved = _read_state(args)
    # Megatron copies into views of float32 parameters, which autograd forbids outside no_grad.
    with torch.no_grad(), _everything_can_be_loaded(args), optimizer_can_be_loaded(policy.optimizer, args):
        try:
            iteration, _ = megatron_load(policy.chunks, policy.optimizer, policy.scheduler)
        except KeyError as error:  # Megatron looks up the groups of parameters that have settings of their own
            raise CheckpointError(
                f"--load {args.load}: its optimizer has other groups of parameters than this run's; give "
                "--decoupled-lr and --apply-wd-to-qk-layernorm as they were, or let the optimizer start anew by "
                "--no-load-optim"
            ) from error
        except CheckpointException as error:  # on all ranks alike, with the ranks' own stack traces as its text
            reason = str(error).strip().splitlines()[-1][:_LONGEST_REASON]
            raise CheckpointError(
                f"--load {args.load}: damaged, or not a checkpoint of the model in --hf-model: {reason}"
            ) from error
    if not args.finetune and iteration != saved["iteration"]:
        raise CheckpointError(
            f"--load {args.load}: the weights are of optimizer step {iteration}, the counters of "
            f"{saved['iteration']}; choose another checkpoint by --ckpt-step"
        )
    policy.scheduler.step(increment=0)  # the rate of this run's settings, at the checkpoint's place in the schedule
    if args.finetune or args.no_load_optim:
        policy.optimizer.reload_model_params()


def _check_optimizer(args: argparse.Namespace, saved: dict[str, Any]) -> None:
    """With expert parallelism Megatron has an optimizer of its own for the experts, whose state stands apart."""
    if saved["optimizer"] is None:
        raise CheckpointError(
            f"--load {args.load}: saved without its optimizer; add --no-load-optim, and the optimizer starts anew"
        )
    if saved["optimizer"] != _kind_of_optimizer(args):
        raise CheckpointError(
            f"--load {args.load}: saved with the {saved['optimizer']} optimizer, whose state cannot be taken over to "
            f"the {_kind_of_optimizer(args)} one; keep it (see --no-use-distributed-optimizer), or let the optimizer "
            "start anew by --no-load-optim"
        )
    there, here = saved["expert_model_parallel_size"], args.expert_model_parallel_size
    if args.num_experts and (there > 1) != (here > 1):
        raise CheckpointError(
            f"--load {args.load}: saved with --expert-model-parallel-size {there}, and its optimizer cannot be taken "
            f"over to {here}; keep it, or let the optimizer start anew by --no-load-optim"
        )


def _kind_of_optimizer(args: argparse.Namespace) -> str:
    if args.use_distributed_optimizer:
        return "distributed"
    return "plain bf16" if args.bf16 else "plain float32"


def _newest_checkpoint(args: argparse.Namespace) -> str:
    from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename

    tracker = get_checkpoint_tracker_filename(args.load)
    if not os.path.isfile(tracker):
        inside = os.path.join(args.load, CHECKPOINTS_FOLDER)
        meant = f"; {inside} has some" if os.path.isdir(inside) else ""
        raise CheckpointError(f"--load {args.load}: no Megatron checkpoint there ({os.path.basename(tracker)}){meant}")
    with open(tracker) as file:
        named = file.read().strip()
    if not named.isdecimal():
        raise CheckpointError(
            f"{tracker}: must hold the iteration of a checkpoint (got {named[:40]!r}); write a whole one's into it"
        )
    return get_checkpoint_name(args.load, args.ckpt_step or int(named), return_base_dir=True)


@contextlib.contextmanager
def _everything_can_be_loaded(args: argparse.Namespace) -> Iterator[None]:
    """Within the block ``--no-save-optim`` and ``--no-save-rng`` are off: Megatron loads only what it would save."""
    kept = args.no_save_optim, args.no_save_rng
    args.no_save_optim = args.no_save_rng = False
    try:
        yield
    finally:
        args.no_save_optim, args.no_save_rng = kept
