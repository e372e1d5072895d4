"""A response's score by the reasoning-gym data set that its problem is from. Runs in the workers."""

import functools
from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import DATASETS, get_score_answer_fn
from reasoning_gym.utils import extract_answer

from megatron.rl.rewards.names import unknown_name


def score(request: dict[str, Any]) -> float:
    """The data set's own score, in [0, 1]; many data sets give partial credit.

    ``source`` names the data set and ``metadata`` is its entry (question, answer, metadata). The response counts
    from its last ``<answer>`` tag, or whole where it has none, without white space at its ends.

    Raises ValueError for an unknown data set or a problem that carries no entry.
    """
    entry = request["metadata"]
    if not {"question", "answer", "metadata"} <= entry.keys():
        raise ValueError(
            "the problem's metadata is no reasoning-gym entry; make the file with tools/make_reasoning_gym_prompts.py"
        )
    answer = extract_answer(request["response"])
    return score_function(request["source"])(request["response"].strip() if answer is None else answer, entry)


@functools.cache
def score_function(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    """The scorer of a data set by name. Raises ValueError, with names alike, where there is none."""
    if dataset not in DATASETS:
        raise ValueError(unknown_name("reasoning-gym data set", dataset, DATASETS))
    return get_score_answer_fn(dataset)
