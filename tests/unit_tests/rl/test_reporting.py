"""What a run's events become: records with every metric, lines, plots and a closing word."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megatron.rl import reporting  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.config import RunConfig  # noqa: E402
from megatron.rl.data import Cut, TokenBatch, collate  # noqa: E402
from megatron.rl.evaluation import Evaluation  # noqa: E402
from megatron.rl.plots import PlotReport  # noqa: E402
from megatron.rl.policy.head import HeadRequest  # noqa: E402
from megatron.rl.policy.learner import UpdateResult  # noqa: E402
from megatron.rl.reporting import Reporter  # noqa: E402
from megatron.rl.rollout.preflight import compare  # noqa: E402
from megatron.rl.run_log import METRICS, PHASES, read_metrics, read_tokens  # noqa: E402
from megatron.rl.types import RewardResult, Sample  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402

SIZES = ("--grpo-prompts-per-step", "2", "--grpo-group-size", "4", "--train-iters", "2", "--global-batch-size", "4")
BEFORE = Evaluation(0.25, 0.5, prompts=4, samples=2, response_length=3.0, unreadable=3, timeouts=1, errors=0)
AFTER = Evaluation(0.875, 1.0, prompts=4, samples=2, response_length=2.5, unreadable=0, timeouts=0, errors=2)


@pytest.fixture
def groups() -> Iterator[SimpleNamespace]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(pp=dist.group.WORLD, tp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch) -> None:
    """The figures have tests of their own, and take seconds."""

    def plot_run(folder: str) -> PlotReport:
        return PlotReport((Path(folder) / "plots" / "curves.png",), ("figure2.png is left out",))

    monkeypatch.setattr(reporting, "plot_run", plot_run)


@pytest.fixture
def run(tmp_path, monkeypatch) -> RunConfig:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)
    return parse_arguments([*SIZES, "--run-dir", str(tmp_path / "run")]).run


def _samples() -> list[Sample]:
    """Two groups of four: one with two time-outs and an error, one of unreadable responses."""
    samples = started.make_samples(8, 53)
    scores = [RewardResult(1.0), RewardResult(0.0, "timeout"), RewardResult(0.0, "timeout"), RewardResult(0.0, "error")]
    scores += [RewardResult(0.0, "unreadable")] * 4
    cut = replace(samples[0].completion, finish_reason="length")
    samples[0] = replace(samples[0], completion=cut)
    return [replace(sample, reward=score) for sample, score in zip(samples, scores, strict=True)]


def _update(samples: list[Sample], loss: float, applied: bool, shift: float) -> tuple[UpdateResult, list[TokenBatch]]:
    """An update whose policy gives every token ``shift`` nat more than the engine."""
    batches, requests = [], []
    for places in ((0, 1), (2, 3)):
        batch = collate(samples, Cut(places, 2, 14), 0)
        logprobs = batch.behavior_logprobs + shift
        tokens = {
            "logprobs": logprobs,
            "entropy": torch.full_like(logprobs, 0.5),
            "tv": (logprobs.exp() - batch.behavior_logprobs.exp()).abs(),
            "ratio": (logprobs - batch.behavior_logprobs).exp(),
            "weight": torch.ones_like(logprobs),
        }
        batches.append(batch)
        requests.append(HeadRequest(batch.targets, batch.mask, 53, 1.0, None, False, tokens=tokens))
    return UpdateResult(loss, 2 * loss if applied else None, 3e-4, applied, requests), batches


def _report_a_step(reporter: Reporter, samples: list[Sample], step: int, iteration: int) -> None:
    for phase in ("rollout", "reward", "train", "sync"):
        with reporter.phase(phase):
            pass
    reporter.rollout(samples)
    reporter.update(*_update(samples[:4], loss=1.0, applied=True, shift=0.01), first=True)
    reporter.update(*_update(samples[4:], loss=2.0, applied=False, shift=-0.5), first=False)
    reporter.probe(compare([[-1.0]], [[-1.25]], "float32"))
    reporter.step(step, iteration)


def _report_all(run: RunConfig, groups: SimpleNamespace) -> None:
    with Reporter(run, groups, torch.device("cpu"), 1, None) as reporter:
        reporter.start([("model", "tiny")], ["layers are local"])
        with reporter.phase("logprob"):
            report = compare([[-1.0, -2.0]], [[-1.5, -2.0]], "fp8")
        reporter.preflight(0, 0, report)
        with reporter.phase("eval"):
            pass
        reporter.evaluation(0, 0, BEFORE)
        _report_a_step(reporter, _samples(), 1, 2)
        for phase in ("save", "eval"):
            with reporter.phase(phase):
                pass
        reporter.evaluation(1, 2, AFTER)
        saved = [("Megatron checkpoint", "there"), ("Hugging Face export", "elsewhere")]
        reporter.finish([(0, BEFORE), (1, AFTER)], saved)


def test_every_documented_metric_is_recorded(run, groups):
    _report_all(run, groups)
    before, step = read_metrics(run.trainer.run_dir)
    # the check's own pass is timed for the display alone
    assert before.keys() | step.keys() == METRICS.keys() - {"time/logprob"}
    assert {f"time/{phase}" for phase in PHASES} - step.keys() == {"time/logprob"}


def test_the_numbers_are_those_of_the_events(run, groups):
    _report_all(run, groups)
    before, step = read_metrics(run.trainer.run_dir)
    assert (before["step"], before["mismatch/logprob"], before["eval/reward"]) == (0, 0.25, 0.25)
    assert (before["eval/pass_at_k"], before["eval/timeouts"], step["eval/errors"]) == (0.5, 1, 2)
    assert (before["eval/unreadable"], step["eval/unreadable"]) == (3, 0)
    lengths = [len(sample.completion.token_ids) for sample in _samples()]
    held = sum(lengths) + sum(len(sample.completion.prompt_ids) for sample in _samples())
    expected = {
        "iteration": 2,
        "mismatch/after_sync": 0.25,
        "reward/mean": 1 / 8,
        "reward/unreadable": 4,
        "reward/timeouts": 2,
        "reward/errors": 1,
        "reward/flat_groups": 0.5,
        "reward/incomplete_groups": 0.5,
        "response/length": sum(lengths) / 8,
        "response/length_max": max(lengths),
        "response/truncated": 1 / 8,
        "response/aborted": 1,
        "train/loss": 1.5,
        "train/grad_norm": 2.0,  # of the update that was applied
        "train/learning_rate": 3e-4,
        "train/skipped_updates": 1,
        "train/micro_batches": 4,
        "train/padding": 1 - held / (8 * 14),
        "policy/tokens": sum(lengths),
        "policy/entropy": 0.5,
        "weight/negative_share": 0,
    }
    assert {name: step[name] for name in expected} == pytest.approx(expected)
    assert step["ratio/max"] == pytest.approx(1.01005, rel=1e-5) and step["ratio/min"] == pytest.approx(0.60653, 1e-5)
    # before the first update only: later ones have moved pi on purpose
    assert step["mismatch/logprob"] == pytest.approx(0.01, rel=1e-4)
    assert step["mismatch/k3"] == pytest.approx(5e-5, rel=1e-2)


def test_the_token_sample_is_of_the_first_update(run, groups):
    _report_all(run, groups)
    tokens = read_tokens(run.trainer.run_dir)
    assert len(tokens.logp) == sum(len(sample.completion.token_ids) for sample in _samples()[:4])
    torch.testing.assert_close(torch.tensor(tokens.logp - tokens.logmu), torch.full((len(tokens.logp),), 0.01))


def test_what_a_person_reads(run, groups, capsys):
    _report_all(run, groups)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "DRPO on Megatron-Core" and "note: layers are local" in lines
    assert any(line.startswith("engine and trainer agree: mean abs(log pi - log mu) 2.50e-01 nat") for line in lines)
    assert any(line.startswith("step 1/1 | reward 0.125") and "rewards timed out: 2" in line for line in lines)
    assert lines[-7:] == [
        "figure2.png is left out",
        "Megatron checkpoint: there",
        "Hugging Face export: elsewhere",
        f"plots: {Path(run.trainer.run_dir) / 'plots'}",
        "first evaluation (step 0): reward 0.250, pass@2 0.500 on 4 held-out problems",
        "last evaluation (step 1): reward 0.875, pass@2 1.000 on 4 held-out problems",
        "reward gained: +0.625",
    ]


def test_a_run_that_ends_early_says_why_and_how_it_goes_on(run, groups, capsys):
    with Reporter(run, groups, torch.device("cpu"), 2, None) as reporter:
        _report_a_step(reporter, _samples(), 1, 2)
        reporter.stopped("1 minutes are up (--exit-duration-in-mins)")
    last = capsys.readouterr().out.splitlines()[-1]
    assert (
        last
        == "stopped: 1 minutes are up (--exit-duration-in-mins); the checkpoint is saved, and --load goes on from it"
    )
    assert [record["step"] for record in read_metrics(run.trainer.run_dir)] == [1]


def test_a_run_without_evaluation_gains_nothing_to_speak_of(run, groups, capsys):
    with Reporter(run, groups, torch.device("cpu"), 1, None) as reporter:
        _report_a_step(reporter, _samples(), 1, 2)
        reporter.finish([], [("Megatron checkpoint", "there")])
    out = capsys.readouterr().out
    assert "evaluation (step" not in out and "reward gained" not in out


def test_a_resumed_run_goes_on_behind_its_records(run, groups, capsys):
    _report_all(run, groups)
    with Reporter(run, groups, torch.device("cpu"), 2, 1) as reporter:
        reporter.preflight(1, 2, compare([[-1.0]], [[-1.0]], "float32"))
        _report_a_step(reporter, _samples(), 2, 4)
    records = read_metrics(run.trainer.run_dir)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert records[0]["mismatch/logprob"] == 0.25  # the check after the restart belongs to step 1
    assert sorted(set(read_tokens(run.trainer.run_dir).step.tolist())) == [1, 2]
    assert "step 2/2 |" in capsys.readouterr().out


def test_a_step_whose_updates_were_all_skipped_has_no_gradient_norm(run, groups, capsys):
    with Reporter(run, groups, torch.device("cpu"), 1, None) as reporter:
        reporter.rollout(_samples())
        reporter.update(*_update(_samples()[:4], loss=1.0, applied=False, shift=0.01), first=True)
        reporter.step(1, 1)
    (record,) = read_metrics(run.trainer.run_dir)
    assert record["train/skipped_updates"] == 1 and "train/grad_norm" not in record
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("step 1/1"))
    assert "updates skipped: 1" in line and "grad " not in line
