"""A problem's text or chat messages to the token ids that the policy continues."""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron.rl.data.records import Messages, Record
from megatron.rl.errors import ConfigError, DataError

# Others are taken where the template itself names them.
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Tokenizer(Protocol):
    """What is used of a ``transformers`` tokenizer."""

    chat_template: Any
    eos_token_id: int | None

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Added tokens by id, each with its ``content``; ``special`` says whether it is a control token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """Token ids to the tokens' own spelling."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, continue_final_message: bool
    ) -> Any:
        """Chat messages to the text that the model was taught to answer."""


class PromptEncoder:
    """Encodes the prompts of one file.

    Plain text gets the special tokens that the tokenizer puts before a text, unless it starts with them already, and
    none of those that it puts after one: they would end the prompt before its response. Messages go through the
    tokenizer's chat template, which brings its own special tokens; a last message of the assistant is continued, any
    other is answered.

    Args:
        tokenizer: a ``transformers`` tokenizer.
        vocab_size: token ids are below it.
        always_chat: sends plain text through the template too, as one message of the user.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, always_chat: bool) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._always_chat = always_chat
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple(token.content for token in added if token.special and token.content)
        self.unended = 0  # prompts that went without the tokenizer's own end

    def __call__(self, record: Record) -> tuple[str, tuple[int, ...]]:
        """The prompt as text and as token ids.

        Raises:
            DataError: one line with file, line number and way out.
            ConfigError: a tokenizer whose special tokens cannot be told from a text's.
        """
        if isinstance(record.prompt, str) and not self._always_chat:
            text, token_ids = record.prompt, self._encode_text(record.prompt)
        else:
            text = self._chat_text(self._messages(record), record.place)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        self._check(token_ids, record.place)
        return text, tuple(token_ids)

    def _encode_text(self, text: str) -> list[int]:
        whole = self._tokenizer.encode(text)
        bare = self._tokenizer.encode(text, add_special_tokens=False)
        count = len(whole) - len(bare)
        before = next((n for n in range(count, -1, -1) if whole[n : n + len(bare)] == bare), None)
        if before is None:
            raise ConfigError(
                "the tokenizer of --hf-model cuts a text into other tokens once it adds special ones; "
                "use the tokenizer.json that came with the model"
            )
        self.unended += before < count
        prefix = whole[:before]
        return bare if bare[:before] == prefix else prefix + bare

    def _messages(self, record: Record) -> Messages:
        if isinstance(record.prompt, str):
            messages, remedy = [{"role": "user", "content": record.prompt}], "leave --apply-chat-template out"
        else:
            messages, remedy = record.prompt, "make it the prompt itself instead of a message"
        for message in messages:
            begins = (token for token in self._special if message["content"].lstrip().startswith(token))
            token = next(begins, None)
            if token is not None and message["role"] != "assistant":
                raise DataError(
                    f"{record.place}: the prompt starts with the special token {token!r}, so it has been through a "
                    f"chat template already; {remedy}"
                )
        return messages

    def _chat_text(self, messages: Messages, place: str) -> str:
        template = self._tokenizer.chat_template
        if not template:
            raise DataError(
                f"{place}: chat messages need a tokenizer with a chat template, and this model's has none; "
                "use another model, or write the prompt as text"
            )
        for role in (message["role"] for message in messages):
            if role not in _ROLES and not any(quoted in str(template) for quoted in (f"'{role}'", f'"{role}"')):
                raise DataError(
                    f"{place}: the chat template does not know the role {role!r} of a message; "
                    f"choose one of {', '.join(_ROLES)}"
                )
        continued = messages[-1]["role"] == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not continued, continue_final_message=continued
            )
        except Exception as error:  # a template is a program of its own; what it raises is its answer to the messages
            reason = " ".join(str(error).split())
            raise DataError(f"{place}: the tokenizer's chat template refuses the messages ({reason})") from error

    def _check(self, token_ids: list[int], place: str) -> None:
        if not token_ids:
            raise DataError(f"{place}: the tokenizer gives this prompt no token")
        outside = [id for id in token_ids if not 0 <= id < self._vocab_size]
        if outside:
            raise DataError(
                f"{place}: the prompt has the token {self._spelling(outside[0])}, whose id {outside[0]} is outside the "
                f"model's vocabulary of {self._vocab_size}; take tokenizer and weights from one model"
            )
        if token_ids[-1] == self._tokenizer.eos_token_id:
            raise DataError(
                f"{place}: the prompt ends in the end-of-sequence token {self._spelling(token_ids[-1])}, and nothing "
                "follows that; take it off the text, or use a chat template that opens the assistant's turn"
            )

    def _spelling(self, token_id: int) -> str:
        return repr(self._tokenizer.convert_ids_to_tokens([token_id])[0])
