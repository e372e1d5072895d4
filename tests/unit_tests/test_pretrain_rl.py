"""The program from its command line: runs in several layouts, what they leave behind, resuming, and mistakes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
from safetensors.torch import load_file, save_file  # noqa: E402

import pretrain_rl  # noqa: E402
from megatron.rl import assets, checkpoint  # noqa: E402
from megatron.rl.run_log import read_metrics  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402

ROOT = Path(pretrain_rl.__file__).parent
# Before the first update pi is mu and a group's advantages add up to zero, so the loss comes from longer responses
# being better or worse than shorter ones. With this seed they are; where they are not it is zero but for rounding.
SIZES = (
    *("--grpo-prompts-per-step", "8", "--grpo-group-size", "4", "--reward", "exact", "--seed", "1"),
    *("--rl-prompts-per-eval", "4", "--eval-samples", "1"),
)
TP2 = ("--tensor-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
FP8 = ("--fp8-format", "e4m3")
PP2 = ("--pipeline-model-parallel-size", "2")
DRIVEN_ALONE = {"FP8": FP8, "bf16": ("--bf16",)}
DRIVEN = {
    "data 2": (),
    "expert 2": EP2,
    "pipeline 2": PP2,
    "tensor 2, FP8": (*TP2, *FP8),
    "expert 2, FP8": (*EP2, *FP8),
}


def _launch(argv: list[str], processes: int | None) -> subprocess.Popen:
    """Starts the program as a user does: under torchrun, or by itself for None."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *(torchrun if processes else []), str(ROOT / "pretrain_rl.py"), *argv],
        env=environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    status: int
    out: str
    err: str
    folder: Path

    def metrics(self) -> dict[int, dict[str, float]]:
        """The numbers that training fixes, by step: all but those of the clock."""
        return {
            int(record["step"]): {k: v for k, v in record.items() if not k.startswith(("time/", "speed/", "wall_time"))}
            for record in read_metrics(self.folder)
        }

    def first_loss(self) -> float:
        """The loss of the first step."""
        return self.metrics()[1]["train/loss"]


def _wait(process: subprocess.Popen, folder: Path) -> Ended:
    try:
        out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its processes along
        raise
    return Ended(process.returncode, out, err, folder)


def _argv(folder: Path, *flags: str, iterations: int = 2) -> list[str]:
    return [*SIZES, "--train-iters", str(iterations), "--run-dir", str(folder), *flags]


def _misfit(folder: Path) -> Path:
    """The bundled model with one tensor of another shape."""
    shutil.copytree(assets.bundled_model_dir(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, Ended]:
    """Runs as a user starts them, side by side: of one process, of two, and of a model that does not fit."""
    root = tmp_path_factory.mktemp("launched")
    prompts = (
        "--train-prompts",
        str(assets.bundled_train_prompts()),
        "--eval-prompts",
        str(assets.bundled_eval_prompts()),
    )
    limits = ("--max-prompt-tokens", "16", "--max-response-tokens", "8")
    misfit = ("--hf-model", str(_misfit(root / "model")), *prompts, *limits)
    processes = {
        "one process": _launch(_argv(root / "one process", "--save-interval", "2", iterations=4), 1),
        "tensor 2": _launch(_argv(root / "tensor 2", *TP2), 2),
        "misfit": _launch(_argv(root / "misfit", *misfit), None),
    }
    return {name: _wait(process, root / name) for name, process in processes.items()}


def _drive(rank: int, world_size: int, root: Path, runs: dict[str, tuple[str, ...]]) -> None:
    """Runs of the program, one after the other in these processes."""
    for name, flags in runs.items():
        # the processes go on to the next run; plots are those of the runs that were launched
        with mock.patch("torch.distributed.destroy_process_group"), mock.patch("megatron.rl.reporting.plot_run"):
            assert pretrain_rl.main(_argv(root / name, *flags)) == 0
        started.take_down()


def _logprobs_of_checkpoint(folder: Path) -> dict[int, list[float]]:
    """The trainer's log-probabilities of this data-parallel rank's samples, by their place."""
    with started.started(["--load", str(folder)], load=False) as here:
        checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
        batches, dp = here.batches(_samples(), 3), here.policy.groups.dp
        requests = here.learner().logprobs(batches)
        rows = [
            request.tokens["logprobs"][row][mask].tolist()
            for batch, request in zip(batches, requests, strict=True)
            for row, mask in enumerate(batch.mask)
        ]
        return {place: rows[i] for i, place in enumerate(range(dp.rank(), len(_samples()), dp.size()))}


def _drive_two(rank: int, world_size: int, root: Path, checkpoints: Path) -> dict[int, list[float]]:
    _drive(rank, world_size, root, DRIVEN)
    return _logprobs_of_checkpoint(checkpoints)


def _samples() -> list:
    return started.make_samples(12, 53, seed=3)


@dataclass(frozen=True)
class Driven:
    """What ran after the launched runs."""

    runs: dict[str, Ended]
    logprobs: dict[int, list[float]]  # by the trainer, of the last checkpoint of the launched run of one process
    resumed: Ended  # the same run again, from its first checkpoint


@pytest.fixture(scope="module")
def driven(launched, tmp_path_factory) -> Driven:
    root = tmp_path_factory.mktemp("driven")
    checkpoints = launched["one process"].folder / "checkpoints"
    resume = ("--load", str(checkpoints), "--ckpt-step", "2")
    resuming = _launch(_argv(root / "resumed", *resume, iterations=4), None)
    run_ranks(1, _drive, root, DRIVEN_ALONE)
    by_rank = run_ranks(2, _drive_two, root, checkpoints, timeout=240)
    resumed = _wait(resuming, root / "resumed")
    runs = {name: Ended(0, "", "", root / name) for name in [*DRIVEN_ALONE, *DRIVEN]}
    return Driven(runs, by_rank[0] | by_rank[1], resumed)


def test_a_run_ends_well_and_says_so(launched):
    run = launched["one process"]
    assert run.status == 0, run.err
    assert "engine and trainer agree" in run.out
    *_, first, last, gained = run.out.strip().splitlines()
    assert first.startswith("first evaluation (step 0): reward ")
    assert last.startswith("last evaluation (step 2): reward ")
    assert gained.startswith("reward gained: ")
    assert "Traceback" not in run.err


def test_a_run_leaves_its_folder_behind(launched):
    folder = launched["one process"].folder
    assert {path.name for path in folder.iterdir()} == {
        *("run.json", "metrics.jsonl", "tokens.npz", "tensorboard", "plots", "checkpoints", "hf")
    }
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        *("iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt")
    }
    assert (folder / "plots" / "reward.png").stat().st_size > 1000
    assert any((folder / "tensorboard").iterdir())
    assert list(launched["one process"].metrics()) == [0, 1, 2]


@pytest.mark.parametrize("name", ["tensor 2", *DRIVEN])
def test_the_first_steps_loss_is_one_process_s(launched, driven, name):
    run = launched["tensor 2"] if name == "tensor 2" else driven.runs[name]
    assert run.status == 0, run.err
    alone = driven.runs["FP8"] if "FP8" in name else launched["one process"]
    assert abs(alone.first_loss()) > 1e-3
    assert run.first_loss() == pytest.approx(alone.first_loss(), rel=1e-5)


@pytest.mark.parametrize("name", DRIVEN_ALONE)
def test_another_precision_is_another_run_close_by(launched, driven, name):
    exact, rounded = (run.metrics()[1] for run in (launched["one process"], driven.runs[name]))
    assert rounded["mismatch/logprob"] > 100 * exact["mismatch/logprob"]
    assert rounded["mismatch/logprob"] < 0.1
    assert rounded["policy/entropy"] == pytest.approx(exact["policy/entropy"], rel=0.2)


def test_transformers_gives_the_exports_log_probabilities(launched, driven):
    exported = started.hf_logprobs(launched["one process"].folder / "hf", _samples())
    differences = [
        np.abs(np.subtract(driven.logprobs[place], expected)).max()
        for place, expected in enumerate(exported)
        if expected
    ]
    assert len(differences) == len(_samples()) - 1
    assert max(differences) < 1e-4
    bundled = started.hf_logprobs(assets.bundled_model_dir(), _samples())
    assert np.abs(np.subtract(exported[0], bundled[0])).max() > 1e-3, "training moved nothing"


def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(launched, driven):
    run = driven.resumed
    assert run.status == 0, run.err
    assert "go on from" in run.out
    resumed, whole = run.metrics(), launched["one process"].metrics()
    assert max(resumed) == 2
    training = [name for name in whole[2] if not name.startswith("eval/")]
    assert {name: resumed[2][name] for name in training} == {name: whole[2][name] for name in training}
    assert resumed[2]["eval/reward"] == whole[2]["eval/reward"]


def _assert_one_error_line(status: int, err: str, *words: str) -> None:
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert status == 2
    assert len(errors) == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in errors[0], errors[0]


def test_a_checkpoint_whose_tensors_do_not_fit(launched):
    run = launched["misfit"]
    _assert_one_error_line(run.status, run.err, "model.norm.weight", "(32,)", "(64,)")
    assert not run.folder.exists()


def _write(folder: Path, *lines: str) -> str:
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "prompts.jsonl")


GOOD = json.dumps({"prompt": "1+1=", "answer": "2"})
MISTAKES = {
    "loss": (["--loss", "nonsense"], "drpo"),
    "delta": (["--loss-delta", "0"], "delta"),
    "group": (["--grpo-group-size", "1"], "--grpo-group-size must be at least 2"),
    "layout": (["--tensor-model-parallel-size", "3"], "start a multiple of 3"),
    "missing": (["--train-prompts", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    "model": (["--hf-model", "nowhere"], "no config.json there"),
}
PROMPT_FILES = {
    "malformed": ([GOOD, '{"prompt": '], ":2"),
    "answer": ([GOOD, GOOD, json.dumps({"prompt": "1+1=", "answer": ["2"]})], ":3"),
    "over-long": ([json.dumps({"prompt": "1+1+" * 9 + "1=", "answer": "10"})], "--overlong-prompts skip"),
    "empty": ([], "no prompt in it"),
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_in_the_flags_is_one_line(capsys, flags):
    argv, word = MISTAKES[flags]
    status = pretrain_rl.main(argv)
    _assert_one_error_line(status, capsys.readouterr().err, word)


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_a_mistake_in_the_prompts_is_one_line(capsys, tmp_path, name):
    lines, word = PROMPT_FILES[name]
    status = pretrain_rl.main(["--train-prompts", _write(tmp_path, *lines), "--run-dir", str(tmp_path / "run")])
    _assert_one_error_line(status, capsys.readouterr().err, "prompts.jsonl", word)
    assert not (tmp_path / "run").exists()


def test_one_rank_tells_and_every_rank_leaves_word_for_torchrun(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert pretrain_rl.main(["--loss", "nonsense"]) == 2
    assert "error:" not in capsys.readouterr().err
    assert "nonsense" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]
