"""Faults that users of other trainers reported in their parallel layouts, on the real learner in two processes.

Those of batches alone are tested beside the code that makes batches.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.rl.types import Sample
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl import started
from tests.unit_tests.rl.layouts.table import DENSE, MOE, Layout
from tests.unit_tests.rl.layouts.training import ROUNDING, Outcome, compare, samples, train
from tests.unit_tests.rl.weights import tiny


def one_token() -> list[Sample]:
    """Three responses, of which one has a token."""
    whole = started.make_samples(3, tiny.VOCAB, seed=5)
    lengths = (0, 1, 0)
    return [
        replace(
            sample,
            completion=replace(
                sample.completion,
                token_ids=sample.completion.token_ids[:length],
                logprobs=sample.completion.logprobs[:length],
                versions=sample.completion.versions[:length],
            ),
            advantage=1.5,
        )
        for sample, length in zip(whole, lengths, strict=True)
    ]


def by_length() -> list[Sample]:
    """Dealt in turn, the even places and the odd ones are far apart in tokens."""
    ordered = sorted(samples(), key=lambda sample: len(sample.completion.token_ids))
    return [sample for pair in zip(ordered[:6], ordered[:-7:-1], strict=True) for sample in pair]


def long_responses() -> list[Sample]:
    return [sample for sample in samples() if len(sample.completion.token_ids) > 4]


CASES = {
    # Megatron-LM PR #7513: denominators of a context-parallel rank's own tokens halved the gradient.
    "one token in all, context parallel": (DENSE, "CP2", one_token),
    "one token in all, context parallel, packed": (DENSE, "CP2 packed", one_token),
    # verl PR #4250: a wrong label where a response crosses a context-parallel boundary.
    "responses across context boundaries": (DENSE, "CP2", long_responses),
    # ms-swift PR #8102: a rank without samples hung.
    "a data-parallel rank without samples": (DENSE, "packed", lambda: samples()[:1]),
    "an expert-parallel rank without samples": (MOE, "EP2 packed", lambda: samples()[:1]),
    # NeMo-RL PR #4079: uneven packed lengths on expert-parallel ranks broke the first step.
    "uneven lengths on expert-parallel ranks, rows": (MOE, "EP2", by_length),
    "uneven lengths on expert-parallel ranks, packed": (MOE, "EP2 packed", by_length),
}


def outcomes(rank: int, ranks: int, folders: dict[str, Path]) -> list[Outcome]:
    return [
        train(Layout(ranks, model, words if ranks > 1 else ""), folders, rank, on())
        for model, words, on in CASES.values()
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[list[Outcome], Outcome]]:
    """Of each case the ranks' outcomes, and one process's."""
    folders = {model: tmp_path_factory.mktemp(model) for model in (DENSE, MOE)}
    for model, folder in folders.items():
        tiny.save_hf(model, folder)
    (alone,) = run_ranks(1, outcomes, folders)
    by_rank = run_ranks(2, outcomes, folders)
    return {case: (list(ranks), expected) for case, expected, *ranks in zip(CASES, alone, *by_rank, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_reported_faults_do_not_happen(case, found):
    ranks, alone = found[case]
    worst = compare(ranks, alone)
    assert max(worst.values()) <= ROUNDING, worst
