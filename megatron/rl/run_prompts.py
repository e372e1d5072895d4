"""The prompts of a run: read and tokenised, and their right answers scored, before any model is built."""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import ProcessGroup

from megatron.rl.arguments import ParsedArguments
from megatron.rl.data import PromptSet, load_prompts
from megatron.rl.errors import RewardError
from megatron.rl.patience import on_all_ranks
from megatron.rl.rewards import Scorer, check_share, unscorable
from megatron.rl.types import Prompt

_SHOWN = 3  # problems that a message names
_SHOWN_CHARACTERS = 60
_MANY = 10_000  # right answers take seconds to score, and the wait is announced


@dataclass(frozen=True)
class RunPrompts:
    """What is trained and evaluated on, and a line for each thing that was found."""

    train: PromptSet
    held_out: PromptSet | None
    notes: list[str]


def read_prompts(parsed: ParsedArguments, tokenizer: Any) -> list[PromptSet]:
    """The prompts to train on, and to evaluate on where there are any.

    Raises :class:`~megatron.rl.errors.DataError` for a fault of a file.
    """
    data = parsed.run.data
    return [
        load_prompts(
            path,
            tokenizer,
            vocab_size=parsed.hf_config.vocab_size,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong_prompts,
            apply_chat_template="always" if data.apply_chat_template else "auto",
        )
        for path in (data.train_prompts, data.eval_prompts)
        if path
    ]


def check_answers(
    parsed: ParsedArguments, files: Sequence[PromptSet], scorer: Scorer, group: ProcessGroup
) -> RunPrompts:
    """Has the ranks of ``group`` share the scoring of the right answers of what :func:`read_prompts` has read.

    A problem whose right answer does not score 1, in the form that the reward asks for, teaches nothing: every response
    to it scores alike. Such problems are told, and left out with ``--unscorable-prompts skip``. Collective; no rank
    waits for another by the deadline of training.

    Raises, on all ranks, :class:`~megatron.rl.errors.RewardError` where none of a file's problems can be scored.
    """
    kept: list[PromptSet] = []
    notes: list[str] = []
    for prompts in files:
        found = _unscorable(scorer, prompts, group)
        if len(found) == len(prompts):
            raise RewardError(_none_can_be_scored(prompts, parsed.run.reward.name, found[0]))
        skips = parsed.run.data.unscorable_prompts == "skip"
        kept.append(_without(prompts, found) if skips else prompts)
        if found:
            notes.append(_told(prompts, found, skips))
    return RunPrompts(kept[0], kept[1] if len(kept) > 1 else None, notes)


def _unscorable(scorer: Scorer, prompts: PromptSet, group: ProcessGroup) -> list[tuple[Prompt, str]]:
    if group.rank() == 0 and len(prompts) > _MANY:
        print(f"note: the right answers of {len(prompts):,} prompts of {prompts.path} are scored once", flush=True)
    shares = on_all_ranks(lambda: check_share(scorer, prompts, group.rank(), group.size()), group)
    reasons: dict[Hashable, str] = dict(itertools.chain.from_iterable(share.items() for share in shares))
    return unscorable(scorer, prompts, reasons)


def _without(prompts: PromptSet, found: list[tuple[Prompt, str]]) -> PromptSet:
    left_out = {prompt.index for prompt, _ in found}
    return replace(prompts, prompts=tuple(prompt for prompt in prompts if prompt.index not in left_out))


def _none_can_be_scored(prompts: PromptSet, reward: str, first: tuple[Prompt, str]) -> str:
    return (
        f"{prompts.path}: no response to any problem can score 1 by --reward {reward}: {_named(*first)}; "
        "mend the prompt file or choose another reward"
    )


def _told(prompts: PromptSet, found: list[tuple[Prompt, str]], skips: bool) -> str:
    named = ", ".join(_named(*problem) for problem in found[:_SHOWN])
    more = f", and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
    what = "they are skipped" if skips else "they are kept and teach nothing; --unscorable-prompts skip leaves them out"
    return (
        f"{len(found):,} of {len(prompts):,} prompts of {prompts.path} have a right answer that does not score 1 as a "
        f"response: {named}{more}; {what}"
    )


def _named(prompt: Prompt, reason: str) -> str:
    reason = " ".join(reason.split())
    return f"line {prompt.line}, answer {prompt.answer[:_SHOWN_CHARACTERS]!r} ({reason[: 2 * _SHOWN_CHARACTERS]})"
