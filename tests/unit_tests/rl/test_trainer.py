"""The order of the loop, with a stand-in for every part."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl import trainer  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.config import BatchingConfig, RunConfig  # noqa: E402
from megatron.rl.data import MicroBatcher, PromptSampler, TokenBatch  # noqa: E402
from megatron.rl.trainer import Parts, Progress, Trainer  # noqa: E402
from megatron.rl.types import Completion, Prompt, RewardResult  # noqa: E402

PROMPTS = [Prompt(i, f"p{i}", (5,) * (1 + i % 3), "") for i in range(7)]
SIZES = (
    "--grpo-prompts-per-step",
    "2",
    "--grpo-group-size",
    "4",
    "--global-batch-size",
    "4",
    "--micro-batch-size",
    "2",
)


class StandIns:
    """All the parts, which write down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.batches: list[list[TokenBatch]] = []
        self.weights: list[torch.Tensor] = []
        self.stops: dict[int, str] = {}  # reasons by optimizer steps finished

    # the engine and what feeds it
    holds_weights_here = True

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(1)

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        assert [name for name, _ in tensors] == ["w"]
        self.log.append(f"weights {version}")

    # the collector
    def sample(self, prompts: list[Prompt], group_size: int, sampling: object, label: str) -> list[Prompt]:
        self.log.append(f"sample {label} {len(prompts)}x{group_size}")
        return [prompt for prompt in prompts for _ in range(group_size)]

    def scored(self, prompts: list[Prompt]) -> list[tuple[Prompt, Completion, RewardResult]]:
        return [
            (prompt, Completion(f"r{i}", prompt.token_ids, (7, 8), (-1.0, -2.0), "stop", (0, 0)), RewardResult(i % 3))
            for i, prompt in enumerate(prompts)
        ]

    # the learner
    def update(self, batches: list[TokenBatch], weights: list[torch.Tensor], samples: int) -> str:
        self.log.append(f"update {samples}")
        self.batches.append(batches)
        self.weights += weights
        return "result"

    def save_checkpoint(self) -> None:
        self.log.append("checkpoint")

    def export_folder(self) -> None:
        self.log.append("export")

    def parts(self, eval_prompts: tuple[Prompt, ...], dp: tuple[int, int]) -> Parts:
        here: Any = self
        return Parts(
            learner=here,
            engine=here,
            collector=here,
            prompts=PromptSampler(PROMPTS, 1),
            preflight_prompts=PROMPTS[:3],
            eval_prompts=eval_prompts,
            reporter=Notes(self.log),  # type: ignore[arg-type]
            export_weights=self.export,
            save_checkpoint=self.save_checkpoint,
            export_folder=self.export_folder,
            saved=[("checkpoint", "there")],
            groups=SimpleNamespace(dp_cp=None),
            micro_batches=MicroBatcher(BatchingConfig(micro_batch_size=2), dp_rank=dp[0], dp_size=dp[1]),
            stop=self.stops.get,
        )


class Notes:
    """A reporter that notes what it is told."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.phases: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def preflight(self, step: int, iteration: int, report: object) -> None:
        self.log.append(f"preflight {step} {iteration}")

    def rollout(self, samples: list) -> None:
        self.samples = samples

    def update(self, result: object, batches: object, *, first: bool) -> None:
        self.log.append("first" if first else "later")

    def step(self, step: int, iteration: int) -> None:
        self.log.append(f"step {step} {iteration}")

    def evaluation(self, step: int, iteration: int, evaluation: object) -> None:
        self.log.append(f"evaluation {step} {iteration}")

    def stopped(self, reason: str) -> None:
        self.log.append(f"stopped: {reason}")

    def finish(self, evaluations: list, saved: object) -> None:
        self.log.append(f"finish {[step for step, _ in evaluations]}")


@pytest.fixture(autouse=True)
def _without_a_check(monkeypatch):
    monkeypatch.setattr(trainer, "check_behaviour_policy", lambda *_: "agrees")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)


def _run(*flags: str) -> RunConfig:
    return parse_arguments([*SIZES, "--eval-samples", "3", *flags]).run


def _train(
    run: RunConfig,
    progress: Progress | None = None,
    eval_prompts: tuple[Prompt, ...] = tuple(PROMPTS[5:]),
    dp: tuple[int, int] = (0, 1),
    stops: dict[int, str] | None = None,
) -> StandIns:
    stand_ins = StandIns()
    stand_ins.stops = stops or {}
    Trainer(run, stand_ins.parts(eval_prompts, dp), progress or Progress()).train()
    return stand_ins


STEP = ["update 4", "first", "update 4", "later"]
START = ["weights 0", "sample preflight 3x2", "preflight 0 0", "sample eval0 2x3", "evaluation 0 0"]


def test_a_whole_run_in_order():
    assert _train(_run("--train-iters", "4")).log == [
        *START,
        *("sample step1 2x4", *STEP, "weights 1", "step 1 2"),
        *("sample step2 2x4", *STEP, "weights 2", "step 2 4", "checkpoint"),  # due after the last iteration
        *("sample eval2 2x3", "evaluation 2 4", "export", "finish [0, 2]"),
    ]


def test_evaluations_and_checkpoints_come_at_their_intervals_and_never_twice():
    log = _train(_run("--train-iters", "6", "--eval-interval", "2", "--save-interval", "4")).log
    assert [entry for entry in log if entry.startswith(("evaluation", "checkpoint", "step"))] == [
        *("evaluation 0 0", "step 1 2", "evaluation 1 2", "step 2 4", "checkpoint", "evaluation 2 4"),
        *("step 3 6", "evaluation 3 6", "checkpoint"),
    ]


def test_a_resumed_run_goes_on_at_the_next_step():
    log = _train(_run("--train-iters", "4"), Progress(step=1, iteration=2)).log
    assert log[:5] == ["weights 1", "sample preflight 3x2", "preflight 1 2", "sample eval1 2x3", "evaluation 1 2"]
    assert log[5] == "sample step2 2x4"
    assert log[-1] == "finish [1, 2]"


def test_a_resumed_run_ends_at_the_optimizer_steps_asked_for_whatever_a_batch_was_before():
    """Four steps in two batches are behind; now a batch is one step."""
    log = _train(_run("--train-iters", "6", "--global-batch-size", "8"), Progress(step=2, iteration=4, saved=4)).log
    assert [entry for entry in log if entry.startswith(("step", "checkpoint"))] == [
        "step 3 5",
        "step 4 6",
        "checkpoint",
    ]


@pytest.mark.parametrize(("saved", "checkpoints"), [(4, 0), (None, 1)])
def test_a_run_with_nothing_left_to_do_evaluates_once_and_saves_where_it_has_not_saved(saved, checkpoints):
    log = _train(_run("--train-iters", "4", "--save-interval", "2"), Progress(step=2, iteration=4, saved=saved)).log
    assert log.count("checkpoint") == checkpoints and log.count("evaluation 2 4") == 1
    assert log[-2:] == ["export", "finish [2]"]


def test_a_run_that_is_to_end_early_saves_and_ends_after_the_step():
    log = _train(_run("--train-iters", "6", "--eval-interval", "2"), stops={4: "time is up"}).log
    assert [entry for entry in log if entry.startswith(("step", "checkpoint", "evaluation", "stopped", "finish"))] == [
        *("evaluation 0 0", "step 1 2", "evaluation 1 2", "step 2 4", "checkpoint", "stopped: time is up")
    ]
    assert "export" not in log


def test_a_checkpoint_that_is_due_where_a_run_ends_early_is_saved_once():
    log = _train(_run("--train-iters", "6", "--save-interval", "4"), stops={4: "time is up"}).log
    assert log.count("checkpoint") == 1


def test_a_run_that_is_done_does_not_end_early():
    log = _train(_run("--train-iters", "4"), stops={4: "time is up"}).log
    assert log[-1] == "finish [0, 2]"


def test_a_run_without_held_out_problems():
    log = _train(_run("--train-iters", "2"), eval_prompts=()).log
    assert not [entry for entry in log if "eval" in entry]
    assert log[-1] == "finish []"


def test_several_epochs_over_a_rollout_batch_keep_it():
    """mu stays the engine's through all updates; only the very first has pi = mu."""
    stand_ins = _train(_run("--train-iters", "4", "--grpo-iterations", "2"))
    updates = [entry for entry in stand_ins.log if entry in ("first", "later")]
    assert updates == ["first", "later", "later", "later"]
    first, second, again, _ = stand_ins.batches
    for batch, repeated in zip(first, again, strict=True):
        assert torch.equal(batch.behavior_logprobs, repeated.behavior_logprobs)
        assert torch.equal(batch.tokens, repeated.tokens)
    assert not torch.equal(first[0].tokens, second[0].tokens) or not torch.equal(
        first[0].advantages, second[0].advantages
    )


def test_advantages_are_the_groups_and_weights_the_whole_mini_batch_s():
    stand_ins = _train(_run("--train-iters", "2"))
    rows = torch.cat([batch.advantages for batch in stand_ins.batches[0]])
    scores = torch.tensor([0.0, 1.0, 2.0, 0.0])
    assert torch.allclose(rows.amax(1) + rows.amin(1), scores - scores.mean())
    total = torch.cat(stand_ins.weights[:2]).sum()
    assert total.item() == pytest.approx(4 * 2 / (4 * 8))  # tokens over responses times the horizon


@pytest.mark.parametrize("rank", [0, 1])
def test_each_data_parallel_rank_takes_its_rows_padded_alike(rank):
    whole = _train(_run("--train-iters", "2")).batches[0]
    mine = _train(_run("--train-iters", "2"), dp=(rank, 2)).batches[0]
    everything, share = (torch.cat([batch.tokens for batch in batches]) for batches in (whole, mine))
    assert torch.equal(share, everything[rank::2])


def test_filtered_responses_enter_neither_the_loss_nor_its_denominators(monkeypatch):
    monkeypatch.setattr(StandIns, "scored", _with_a_flat_group)
    # A mini-batch that would be empty is trained on as it is.
    stand_ins = _train(_run("--train-iters", "2", "--grpo-filter-groups-with-same-reward"))
    assert [sum(len(batch.places) for batch in batches) for batches in stand_ins.batches] == [4, 4]
    whole = _train(_run("--train-iters", "1", "--global-batch-size", "8"))
    kept = _train(_run("--train-iters", "1", "--global-batch-size", "8", "--grpo-filter-groups-with-same-reward"))
    assert [entry for entry in kept.log if entry == "update 8"] == ["update 8"]  # the schedule counts them all
    assert sum(len(batch.places) for batch in whole.batches[0]) == 8
    assert sum(len(batch.places) for batch in kept.batches[0]) == 4
    for stand_ins, responses in ((whole, 8), (kept, 4)):
        weights = torch.cat([weight[weight > 0] for weight in stand_ins.weights])
        assert weights.tolist() == pytest.approx([1 / (responses * 8)] * 2 * responses)


def _with_a_flat_group(self: StandIns, prompts: list[Prompt]) -> list[tuple[Prompt, Completion, RewardResult]]:
    """The second group of four has one score throughout."""
    return [
        (
            prompt,
            Completion(f"r{i}", prompt.token_ids, (7, 8), (-1.0, -2.0), "stop", (0, 0)),
            RewardResult(i % 3 if i < 4 else 1.0),
        )
        for i, prompt in enumerate(prompts)
    ]
