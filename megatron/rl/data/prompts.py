"""A prompt file, read, checked and tokenised before any work starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from megatron.rl.data.encoding import PromptEncoder, Tokenizer
from megatron.rl.data.records import read_records
from megatron.rl.errors import ConfigError, DataError
from megatron.rl.types import Prompt


@dataclass(frozen=True)
class PromptSet(Sequence[Prompt]):
    """The prompts of one file that fit the limits."""

    path: str
    prompts: tuple[Prompt, ...]
    skipped: int  # prompts that were over the limit
    unended: int = 0  # prompts that the tokenizer by itself would have ended, with its end-of-sequence token

    @overload
    def __getitem__(self, place: int) -> Prompt: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Prompt, ...]: ...

    def __getitem__(self, place: int | slice) -> Prompt | tuple[Prompt, ...]:
        return self.prompts[place]

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)


def load_prompts(
    path: str,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    max_prompt_tokens: int,
    overlong: str = "error",
    apply_chat_template: Literal["auto", "always"] = "auto",
    limit: int | None = None,
) -> PromptSet:
    """Reads a JSONL file of problems; :func:`megatron.rl.data.records.read_records` has the layouts.

    ``Prompt.text`` is what the policy sees. ``Prompt.index`` counts the file's problems from 0, those that are
    skipped included, so it names the same problem under every limit.

    Args:
        path: the file.
        tokenizer: a ``transformers`` tokenizer; :class:`megatron.rl.data.encoding.PromptEncoder` says which special
            tokens a prompt gets.
        vocab_size: token ids are below it: the rows of the model's embedding.
        max_prompt_tokens: the longest prompt, in tokens, template included.
        overlong: what a longer one does: ``error``, or ``skip``, which counts it.
        apply_chat_template: lists of messages always go through the tokenizer's template; ``always`` sends plain
            text through it too, as one message of the user.
        limit: stop after this many prompts; None reads all.

    Raises:
        ConfigError: an unknown ``overlong``.
        DataError: one line with file, line number and way out for every fault of the file.
    """
    if overlong not in ("error", "skip"):
        raise ConfigError(f"prompts over the limit: choose error or skip (got {overlong!r})")
    encode = PromptEncoder(tokenizer, vocab_size=vocab_size, always_chat=apply_chat_template == "always")
    prompts: list[Prompt] = []
    skipped = 0
    for index, record in enumerate(read_records(path)):
        if limit is not None and len(prompts) >= limit:
            break
        text, token_ids = encode(record)
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, text, token_ids, record.answer, record.source, record.metadata, record.line))
        elif overlong == "skip":
            skipped += 1
        else:
            raise DataError(
                f"{record.place}: the prompt has {len(token_ids)} tokens, over the limit of {max_prompt_tokens}; "
                "raise --max-prompt-tokens, or leave such prompts out with --overlong-prompts skip"
            )
    if not prompts and skipped:
        raise DataError(
            f"{path}: all {skipped} prompts are over the limit of {max_prompt_tokens} tokens; raise --max-prompt-tokens"
        )
    if not prompts:
        raise DataError(f'{path}: no prompt in it; write one JSON object with "prompt" and "answer" a line')
    return PromptSet(path, tuple(prompts), skipped, encode.unended)
