"""The folders that a run writes to: checked before any work, and made this run's own before any rank writes."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from megatron.rl.arguments import ParsedArguments
from megatron.rl.checkpoint import Start, drop_later_checkpoints
from megatron.rl.run_log import Places, check_places, hold_places


def check(parsed: ParsedArguments, start: Start) -> None:
    """Raises :class:`megatron.rl.errors.OutputError`, on rank 0 alone, for a folder that this run cannot have."""
    if parsed.megatron.rank == 0:
        check_places(_places(parsed, start))


@contextlib.contextmanager
def held(parsed: ParsedArguments, start: Start, group: ProcessGroup) -> Iterator[list[str]]:
    """The folders are this run's within the block. Yields, on rank 0, a line for what was done to them.

    Collective over ``group``, of all ranks.
    """
    with contextlib.ExitStack() as stack:
        notes: list[str] = []
        if parsed.megatron.rank == 0:
            notes = stack.enter_context(hold_places(_places(parsed, start)))
            if start.goes_on and (note := drop_later_checkpoints(parsed.megatron, start.iteration)):
                notes.append(note)
        torch.distributed.barrier(group)
        yield notes


def _places(parsed: ParsedArguments, start: Start) -> Places:
    args, config = parsed.megatron, parsed.run
    reads = {
        "--load": args.load,
        "--hf-model": config.hf_model,
        "--train-prompts": config.data.train_prompts,
        "--eval-prompts": config.data.eval_prompts,
    }
    return Places(
        run=start.run,
        run_dir=Path(config.trainer.run_dir),
        save=Path(args.save),
        tensorboard_dir=Path(config.trainer.tensorboard_dir),
        goes_on=start.goes_on,
        reads=tuple((flag, Path(path)) for flag, path in reads.items() if path is not None),
    )
