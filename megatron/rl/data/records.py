"""One line of a prompt file to one problem, whichever of the known layouts it has."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.rl.errors import DataError

Messages = list[dict[str, Any]]
_HAVE = '"prompt" and "answer"'


@dataclass(frozen=True)
class Record:
    """A problem as it stands in the file."""

    place: str  # "FILE:LINE", for messages
    prompt: str | Messages
    answer: str
    source: str
    metadata: dict

    @property
    def line(self) -> int:
        """Counted from 1."""
        return int(self.place.rpartition(":")[2])


def read_records(path: str) -> Iterator[Record]:
    """The problems of a JSONL file, in order, blank lines left out. The layouts, told apart by their fields:

    * this project's: ``prompt`` (text or a list of chat messages), ``answer``; optional ``source``, ``metadata``;
    * DAPO-Math-17k: ``prompt``, ``reward_model.ground_truth``, ``data_source``;
    * GSM8K: ``question``, ``answer`` ending in ``#### 18``, of which the number is the answer, without
      thousands separators; an answer of a single line without the mark is taken whole;
    * AIME 2024 and 2025, MATH-500: ``problem`` and ``answer``, or both capitalised. These sets publish integers,
      so here alone an integer is an answer.

    A field that is null, NaN, blank, or an empty list or object counts as absent everywhere, as data sets of several
    layouts have them once they are put together. That goes for the fields of a message and of ``reward_model`` too.

    Raises :class:`DataError` with file and line for everything else.
    """
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            yield _record(line, f"{path}:{number}")


def _lines(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from file
    except FileNotFoundError:
        raise DataError(f"{path}: no such prompt file; give the path of a JSONL file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a JSONL file") from None


def _record(line: bytes, place: str) -> Record:
    try:
        fields = json.loads(line.decode("utf-8-sig"), parse_constant=_constant)
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}); write one object with {_HAVE} a line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise DataError(f"{place}: JSON that is too large to read ({error}); mend or remove the line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{place}: not a JSON object; write one object with {_HAVE} a line (got {_kind(fields)})")
    prompt, answer, source = _problem(_present(fields), place)
    metadata = _present(fields).get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f'{place}: "metadata" must be an object (got {_kind(metadata)})')
    return Record(place, _checked_prompt(prompt, place), _checked_answer(answer, place), source, metadata)


def _constant(name: str) -> float | None:
    """NaN is how a table of several layouts writes an absent cell."""
    return None if name == "NaN" else float(name)


def _is_present(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value is not None and value not in ([], {})


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if _is_present(value)}


def _problem(fields: dict[str, Any], place: str) -> tuple[Any, Any, str]:
    """Prompt, answer and source, by layout; of the fields that are present."""
    graded = _ground_truth(fields, place)
    if graded is not None or ("reward_model" in fields and "answer" not in fields):
        return fields.get("prompt"), graded, _source(fields, "data_source", place)
    source = _source(fields, "source", place)
    if "prompt" in fields:
        return fields["prompt"], fields.get("answer"), source
    if "question" in fields:
        return fields["question"], _gsm8k_answer(fields.get("answer"), place), source
    for problem, answer in (("problem", "answer"), ("Problem", "Answer")):
        if problem in fields:
            value = fields.get(answer)
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            return fields[problem], str(value) if is_integer else value, source
    names = ", ".join(sorted(fields)) or "none"
    raise DataError(f'{place}: no prompt; give the field "prompt" (the fields with a value here: {names})')


def _ground_truth(fields: dict[str, Any], place: str) -> Any:
    graded = fields.get("reward_model", {})
    if not isinstance(graded, dict):
        raise DataError(f'{place}: "reward_model" must be an object with a "ground_truth" (got {_kind(graded)})')
    return _present(graded).get("ground_truth")


def _source(fields: dict[str, Any], name: str, place: str) -> str:
    source = fields.get(name, "")
    if not isinstance(source, str):
        raise DataError(f'{place}: "{name}" must be text (got {_kind(source)})')
    return source


def _gsm8k_answer(answer: Any, place: str) -> Any:
    if not isinstance(answer, str):
        return answer
    _, mark, final = answer.rpartition("####")
    if mark:
        return final.strip().replace(",", "")
    if "\n" in answer.strip():
        raise DataError(f'{place}: the answer has several lines and no final answer; end it with "#### 18"')
    return answer


def _checked_answer(answer: Any, place: str) -> str:
    if not _is_present(answer):
        raise DataError(f'{place}: no answer; give the field "answer" a value')
    if not isinstance(answer, str):
        raise DataError(f'{place}: the answer is no text (got {_kind(answer)}); put it in quotes, as "answer": "18"')
    return answer


def _checked_prompt(prompt: Any, place: str) -> str | Messages:
    if not _is_present(prompt):
        raise DataError(f'{place}: no prompt; give the field "prompt" a value')
    if isinstance(prompt, list):
        prompt = [_checked_message(message, place) for message in prompt]
        if not any(message["content"].strip() for message in prompt):
            raise DataError(f"{place}: the prompt is empty: no message has content")
    elif not isinstance(prompt, str):
        raise DataError(f"{place}: the prompt is neither text nor a list of chat messages (got {_kind(prompt)})")
    try:
        json.dumps(prompt, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{place}: the prompt has half a surrogate pair, which no tokenizer takes; mend it") from None
    return prompt


def _checked_message(message: Any, place: str) -> dict[str, Any]:
    """The message with its content as one text, and without absent fields: templates ask whether a field is there."""
    if not isinstance(message, dict):
        raise DataError(f'{place}: a chat message needs "role" and "content", both text (got {_kind(message)})')
    content = message.get("content")
    if isinstance(content, list):
        content = _text_of_parts(content, place)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise DataError(f'{place}: a chat message needs "role" and "content", both text (got {_kind(message)})')
    return _present(message) | {"role": message["role"], "content": content}


def _text_of_parts(parts: list[Any], place: str) -> str:
    """How several parts are joined differs from template to template, so there must be one."""
    match parts:
        case [{"text": str(text), **rest}] if rest.get("type") in (None, "text"):
            return text
    kinds = ", ".join(str(part.get("type")) if isinstance(part, dict) else _kind(part) for part in parts) or "none"
    raise DataError(
        f"{place}: the content of a chat message must be text, or a list of one text part (got parts: {kinds})"
    )


def _kind(value: Any) -> str:
    """A JSON value's type and a glimpse of it."""
    names = {dict: "an object", list: "a list", bool: "a boolean", int: "an integer", float: "a number", str: "text"}
    name = "null" if value is None else names[type(value)]
    return name if value is None or isinstance(value, dict | list) else f"{name}, {str(value)[:40]!r}"
