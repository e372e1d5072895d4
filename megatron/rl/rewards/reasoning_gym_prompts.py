"""Problems of reasoning-gym as a prompt file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron.rl.errors import RewardError
from megatron.rl.rewards.names import unknown_name
from megatron.rl.rewards.reasoning_gym_scorer import score


def make_records(
    dataset: str, count: int, seed: int, settings: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The first ``count`` problems of a data set, in this project's prompt layout.

    ``settings`` are the data set's own, such as ``{"max_terms": 2}``; the others stay at their defaults.
    ``metadata`` is the whole entry, which the reasoning-gym reward needs. Raises :class:`RewardError` for an
    unknown data set, and for one that cannot be trained on from a file: no text as answer, or an entry that
    does not survive JSON, shown by its own answer not scoring 1 afterwards.
    """
    if dataset not in DATASETS:
        raise RewardError(unknown_name("reasoning-gym data set", dataset, DATASETS))
    if count < 1:
        raise RewardError(f"at least 1 problem must be made (got {count})")
    try:
        entries = list(reasoning_gym.create_dataset(dataset, size=count, seed=seed, **(settings or {})))
    except AssertionError as error:
        raise RewardError(
            f"reasoning-gym data set {dataset} refuses its settings ({error}); change --config"
        ) from error
    except TypeError as error:
        known = ", ".join(field.name for field in dataclasses.fields(DATASETS[dataset][1]))
        raise RewardError(f"reasoning-gym data set {dataset} has the settings {known} (got {settings})") from error
    return [_record(dataset, number, entry) for number, entry in enumerate(entries)]


def without_prompts_of(path: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``records`` less those whose prompt is in the prompt file ``path``: small data sets give problems twice."""
    try:
        known = {json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()}
    except (OSError, ValueError, KeyError) as error:
        raise RewardError(f"--exclude {path}: not a prompt file of this tool ({error})") from error
    return [record for record in records if record["prompt"] not in known]


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
