"""The prompt files of a run: right answers that cannot score are told, kept or skipped, alike on all ranks."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.rl import cpu_platform

cpu_platform.install()

from megatron.rl import assets, runner  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.errors import DataError, RewardError, UserError  # noqa: E402
from megatron.rl.patience import patient_group  # noqa: E402
from megatron.rl.rewards import make_scorer  # noqa: E402
from megatron.rl.run_prompts import check_answers, read_prompts  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402

ANSWERS = ["2", "??", "3", "2", "??", r"\frac{", "@", "4"]


def _prepared(folder: str, flags: tuple[str, ...], answers: list[str]) -> tuple[list[int], list[int], list[str]]:
    """Indices of the prompts to train and evaluate on, and the notes. The file's first line is blank."""
    path = Path(folder) / f"prompts{dist.get_rank()}.jsonl"
    path.write_text("\n" + "".join(json.dumps({"prompt": "1+1=", "answer": answer}) + "\n" for answer in answers))
    parsed = parse_arguments(["--train-prompts", str(path), "--eval-prompts", str(path), *flags])
    tokenizer = runner.load_tokenizer(str(assets.bundled_model_dir()))
    with make_scorer(parsed.run.reward) as scorer:
        found = check_answers(parsed, read_prompts(parsed, tokenizer), scorer, patient_group())
    assert found.held_out is not None
    return [p.index for p in found.train], [p.index for p in found.held_out], found.notes


def _on_rank(rank: int, world_size: int, folder: str, flags: tuple[str, ...], answers: list[str]) -> object:
    try:
        return _prepared(folder, flags, answers)
    except UserError as error:
        return type(error), str(error)


@pytest.mark.parametrize("ranks", [1, 2])
def test_unscorable_problems_are_told_and_kept(tmp_path, ranks):
    results = run_ranks(ranks, _on_rank, str(tmp_path), (), ANSWERS)
    for rank, (train, held_out, notes) in enumerate(results):
        assert train == held_out == list(range(8))
        assert len(notes) == 2
        assert notes[0] == (
            f"4 of 8 prompts of {tmp_path}/prompts{rank}.jsonl have a right answer that does not score 1 "
            "as a response: "
            "line 3, answer '??' (UnusableAnswer: the answer '??' is not mathematics (no mathematics)), "
            "line 6, answer '??' (UnusableAnswer: the answer '??' is not mathematics (no mathematics)), "
            "line 7, answer '\\\\frac{' (UnusableAnswer: the answer '\\\\frac{' is not mathematics (no mathematics)), "
            "and 1 more; they are kept and teach nothing; --unscorable-prompts skip leaves them out"
        )


def test_unscorable_problems_are_skipped_on_all_ranks_by_flag(tmp_path):
    results = run_ranks(2, _on_rank, str(tmp_path), ("--unscorable-prompts", "skip"), ANSWERS)
    for train, held_out, notes in results:
        assert train == held_out == [0, 2, 3, 7]
        assert notes[0].endswith("and 1 more; they are skipped")


def test_nothing_is_told_of_a_file_without_fault(tmp_path):
    assert run_ranks(1, _on_rank, str(tmp_path), (), ["1", "2"]) == [([0, 1], [0, 1], [])]


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        (
            ["??", "@"],
            RewardError,
            "no response to any problem can score 1 by --reward math-verify: line 2, answer '??'",
        ),
        ([""], DataError, ":2: no answer"),
    ],
)
def test_a_useless_file_is_refused_by_all_ranks_in_one_line(tmp_path, answers, kind, message):
    for found, text in run_ranks(2, _on_rank, str(tmp_path), ("--unscorable-prompts", "skip"), answers):
        assert found is kind
        assert message in text and "\n" not in text
