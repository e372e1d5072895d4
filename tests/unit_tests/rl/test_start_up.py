"""The table at the start, and a line for everything that was chosen by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl import start_up  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.checkpoint import Start  # noqa: E402
from megatron.rl.data import PromptSet  # noqa: E402
from megatron.rl.types import Prompt  # noqa: E402

POLICY: Any = SimpleNamespace(chunks=[torch.nn.Linear(30, 50, bias=False)])
NEW = Start("this")
PROMPT = Prompt(0, "1+1=", (3,), "2")
TRAIN = PromptSet("train.jsonl", (PROMPT,) * 3, skipped=0)
HELD_OUT = PromptSet("eval.jsonl", (PROMPT,) * 2, skipped=4, unended=2)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)


def _describe(*flags: str, held_out: PromptSet | None = None, start: Start = NEW) -> tuple[dict[str, str], list[str]]:
    rows, notes = start_up.describe(parse_arguments(list(flags)), start, POLICY, TRAIN, held_out)
    assert all("\n" not in value for _, value in rows) and all("\n" not in note for note in notes)
    return dict(rows), notes


def test_the_table_says_what_the_run_is_made_of():
    rows, notes = _describe("--grpo-prompts-per-step", "6", "--grpo-group-size", "4", "--train-iters", "8")
    assert "tiny_qwen3_moe (1,500 parameters on this rank)" in rows["model"]
    assert rows["platform"].startswith("CPU over gloo, megatron-core ")
    assert rows["layout"] == "1 process(es): data 1, tensor 1, pipeline 1, context 1, expert 1"
    assert rows["precision"] == "float32"
    assert rows["loss"] == "drpo, delta 12.5, seq-mean-token-sum-norm"
    assert rows["batch"] == "6 prompts x 4 responses a step, 2 optimizer steps of 12 each; 4 steps"
    assert rows["prompts"] == "3 to train (train.jsonl)"
    assert rows["engine"] == "transformers, inside the trainer's processes; temperature 1.0, float32"
    assert notes == ["the layers are megatron-core's local ones, on a CPU"]


def test_emulated_fp8_is_said():
    rows, notes = _describe("--fp8-format", "hybrid", "--bf16")
    assert rows["precision"] == "FP8 hybrid tensorwise over bf16"
    assert notes[0].startswith("FP8 is emulated, not run on FP8 hardware: --fp8-format hybrid")
    assert rows["engine"].endswith(" bfloat16")


def test_skipped_prompts_are_counted():
    rows, notes = _describe("--loss", "grpo", held_out=HELD_OUT)
    assert rows["prompts"] == "3 to train (train.jsonl), 2 held out (eval.jsonl)"
    assert "4 prompts of eval.jsonl are longer than the limit and are skipped" in notes
    assert any(note.startswith("2 prompts of eval.jsonl go without the special tokens") for note in notes)
    assert rows["loss"].startswith("grpo")


def test_layout_and_resuming_are_said(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    rows, notes = _describe("--tensor-model-parallel-size", "2", "--load", str(tmp_path))
    assert rows["layout"] == "4 process(es): data 2, tensor 2, pipeline 1, context 1, expert 1"
    assert "sequence parallelism is on" in notes
    assert f"weights, optimizer and prompt order go on from {tmp_path}" in notes


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--no-load-optim", "weights and prompt order go on from {}; the optimizer starts anew (--no-load-optim)"),
        ("--finetune", "a new run starts from the weights in {} (--finetune)"),
    ],
)
def test_only_what_goes_on_is_said_to(tmp_path, flag, words):
    _, notes = _describe("--load", str(tmp_path), flag)
    assert words.format(tmp_path) in notes


def test_the_steps_behind_a_resumed_run_are_said():
    rows, _ = _describe("--train-iters", "8", "--global-batch-size", "256", start=Start("this", 4, 2))
    assert rows["batch"].endswith("1 optimizer steps of 256 each; 6 steps, 2 of them behind")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--loss grpo", "grpo, lower clip 0.2, upper clip 0.28, "),
        ("--loss spo --loss-eps 0.3", "spo, eps 0.3, "),
        ("--loss pg", "pg, seq-mean"),
        ("--loss kl --no-loss-advantage-weight", "kl, delta 12.5, not weighted by abs(advantage), "),
    ],
)
def test_the_loss_is_told_with_the_numbers_that_it_reads(flags, words):
    assert _describe(*flags.split())[0]["loss"].startswith(words)
