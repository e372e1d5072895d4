"""Problems of reasoning-gym as a prompt file."""

import json
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron.rl.errors import RewardError
from megatron.rl.rewards.names import unknown_name
from megatron.rl.rewards.reasoning_gym_scorer import score


def make_records(dataset: str, count: int, seed: int) -> list[dict[str, Any]]:
    """The first ``count`` problems of a data set with its default settings, in this project's prompt layout.

    ``metadata`` is the whole entry, which the reasoning-gym reward needs. Raises :class:`RewardError` for an
    unknown data set, and for one that cannot be trained on from a file: no text as answer, or an entry that
    does not survive JSON, shown by its own answer not scoring 1 afterwards.
    """
    if dataset not in DATASETS:
        raise RewardError(unknown_name("reasoning-gym data set", dataset, DATASETS))
    if count < 1:
        raise RewardError(f"at least 1 problem must be made (got {count})")
    try:
        entries = list(reasoning_gym.create_dataset(dataset, size=count, seed=seed))
    except AssertionError as error:
        raise RewardError(f"reasoning-gym data set {dataset} has no usable default settings ({error})") from error
    return [_record(dataset, number, entry) for number, entry in enumerate(entries)]


def write_prompt_file(path: Path, records: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _record(dataset: str, number: int, entry: dict[str, Any]) -> dict[str, Any]:
    answer = entry["answer"]
    if not isinstance(answer, str) or not answer.strip():
        raise RewardError(
            f"problem {number} of reasoning-gym data set {dataset} has no text as answer (got {answer!r}); "
            "choose another data set or seed"
        )
    try:
        record = json.loads(
            json.dumps({"prompt": entry["question"], "answer": answer, "source": dataset, "metadata": entry})
        )
    except TypeError as error:
        raise RewardError(f"entries of reasoning-gym data set {dataset} cannot be written as JSON ({error})") from error
    own = score({**record, "response": answer})
    if own != 1.0:
        raise RewardError(
            f"problem {number} of reasoning-gym data set {dataset}, read back from JSON, gives its own answer a score "
            f"of {own}, not 1; choose another data set"
        )
    return record
