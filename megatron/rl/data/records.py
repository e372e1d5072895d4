"""One line of a prompt file to one problem, whichever of the known layouts it has."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.rl.errors import DataError

Messages = list[dict[str, str]]
_HAVE = '"prompt" and "answer"'


@dataclass(frozen=True)
class Record:
    """A problem as it stands in the file."""

    place: str  # "FILE:LINE", for messages
    prompt: str | Messages
    answer: str
    source: str
    metadata: dict


def read_records(path: str) -> Iterator[Record]:
    """The problems of a JSONL file, in order, blank lines left out. The layouts, told apart by their fields:

    * this project's: ``prompt`` (text or a list of chat messages), ``answer``; optional ``source``, ``metadata``;
    * DAPO-Math-17k: ``prompt``, ``reward_model.ground_truth``, ``data_source``;
    * GSM8K: ``question``, ``answer`` ending in ``#### 18``, of which the number is the answer, without
      thousands separators; an answer of a single line without the mark is taken whole;
    * AIME 2024 and 2025, MATH-500: ``problem`` and ``answer``, or both capitalised. These sets publish integers,
      so here alone an integer is an answer.

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
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}); write one object with {_HAVE} a line") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
        raise DataError(f"{place}: JSON that is too large to read ({error}); mend or remove the line") from None
    if not isinstance(fields, dict):
        raise DataError(f"{place}: not a JSON object; write one object with {_HAVE} a line (got {_kind(fields)})")
    prompt, answer, source = _problem(fields, place)
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict):
        raise DataError(f'{place}: "metadata" must be an object (got {_kind(metadata)})')
    return Record(place, _checked_prompt(prompt, place), _checked_answer(answer, place), source, metadata)


def _problem(fields: dict[str, Any], place: str) -> tuple[Any, Any, str]:
    """Prompt, answer and source, by layout."""
    if "reward_model" in fields:
        if not isinstance(fields["reward_model"], dict):
            raise DataError(f'{place}: "reward_model" must be an object with a "ground_truth"')
        answer = fields["reward_model"].get("ground_truth")
        return fields.get("prompt"), answer, _source(fields, "data_source", place)
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
    raise DataError(f'{place}: no prompt; give the field "prompt" (the fields here: {names})')


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
    if answer is None:
        raise DataError(f'{place}: no answer; give the field "answer"')
    if not isinstance(answer, str):
        raise DataError(f'{place}: the answer is no text (got {_kind(answer)}); put it in quotes, as "answer": "18"')
    if not answer.strip():
        raise DataError(f"{place}: the answer is empty")
    return answer


def _checked_prompt(prompt: Any, place: str) -> str | Messages:
    if prompt is None:
        raise DataError(f'{place}: no prompt; give the field "prompt"')
    if isinstance(prompt, list):
        for message in prompt:
            is_message = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
            if not is_message:
                raise DataError(f'{place}: a chat message needs "role" and "content", both text')
    elif not isinstance(prompt, str):
        raise DataError(f"{place}: the prompt is neither text nor a list of chat messages (got {_kind(prompt)})")
    if not (prompt.strip() if isinstance(prompt, str) else prompt):
        raise DataError(f"{place}: the prompt is empty")
    try:
        json.dumps(prompt, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{place}: the prompt has half a surrogate pair, which no tokenizer takes; mend it") from None
    return prompt


def _kind(value: Any) -> str:
    """A JSON value's type and a glimpse of it."""
    names = {dict: "an object", list: "a list", bool: "a boolean", int: "an integer", float: "a number", str: "text"}
    name = "null" if value is None else names[type(value)]
    return name if value is None or isinstance(value, dict | list) else f"{name}, {str(value)[:40]!r}"
