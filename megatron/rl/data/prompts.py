"""A prompt file, read, checked and tokenised before any work starts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, overload

from megatron.rl.data.records import Record, read_records
from megatron.rl.errors import ConfigError, DataError
from megatron.rl.types import Prompt


class Tokenizer(Protocol):
    """What is used of a ``transformers`` tokenizer."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """Chat messages to the text that the model was taught to answer."""


@dataclass(frozen=True)
class PromptSet(Sequence[Prompt]):
    """The prompts of one file that fit the limits."""

    path: str
    prompts: tuple[Prompt, ...]
    skipped: int  # prompts that were over the limit

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
        tokenizer: a ``transformers`` tokenizer. Plain text is encoded with its special tokens; a chat template
            brings its own.
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
    prompts: list[Prompt] = []
    skipped = 0
    for index, record in enumerate(read_records(path)):
        if limit is not None and len(prompts) >= limit:
            break
        text, token_ids = _encode(record, tokenizer, always_chat=apply_chat_template == "always")
        if len(token_ids) <= max_prompt_tokens:
            prompts.append(Prompt(index, text, token_ids, record.answer, record.source, record.metadata))
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
    return PromptSet(path, tuple(prompts), skipped)


def _encode(record: Record, tokenizer: Tokenizer, *, always_chat: bool) -> tuple[str, tuple[int, ...]]:
    prompt = record.prompt
    if isinstance(prompt, str) and not always_chat:
        text, token_ids = prompt, tokenizer.encode(prompt)
    else:
        text = _chat_text(record, tokenizer)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise DataError(f"{record.place}: the tokenizer gives this prompt no token")
    return text, tuple(token_ids)


def _chat_text(record: Record, tokenizer: Tokenizer) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"{record.place}: chat messages need a tokenizer with a chat template, and this model's has none; "
            "use another model, or write the prompt as text"
        )
    prompt = record.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of its own; what it raises is its answer to the messages
        raise DataError(f"{record.place}: the tokenizer's chat template refuses the messages ({error})") from error
