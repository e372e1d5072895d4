"""Every layout takes three optimizer steps on the same weights and data, and gives one process's numbers.

Compared are per-token log-probabilities, losses, gradient norms, every gradient tensor and the weights at the end,
all read from the real learner and optimizer. Layouts of as many processes run one after another in one set of them.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl import assets  # noqa: E402
from megatron.rl.types import Sample  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402
from tests.unit_tests.rl.layouts.gradients import Tensors, gradients_before_steps  # noqa: E402
from tests.unit_tests.rl.layouts.table import ALONE, DENSE, LARGE, LAYOUTS, Layout  # noqa: E402
from tests.unit_tests.rl.weights import tiny  # noqa: E402

# Adam divides by a gradient's own size, so it blows the rounding of a gradient near zero up to a whole step; an eps
# above that rounding keeps the weights comparable.
FLAGS = (
    *("--loss-delta", "0.2", "--rl-default-temperature", "0.8", "--lr", "3e-4", "--adam-eps", "1e-3"),
    *("--max-prompt-tokens", "8", "--max-response-tokens", "8", "--train-prompts", str(assets.bundled_train_prompts())),
    *("--grpo-prompts-per-step", "4", "--grpo-group-size", "8"),
)
STEPS, SAMPLES = 3, 13  # a prime: some rank has fewer, and some row is empty
ROUNDING = 1e-5  # relative; float32


@dataclass(frozen=True)
class Outcome:
    """What a rank has to show of a layout's three steps."""

    losses: list[float]
    grad_norms: list[float]
    logprobs: list[started.Values]  # before each step, of the tokens here; the last pipeline stage's only
    gradients: list[Tensors]  # whole, by Hugging Face names; rank 0's only
    weights: Tensors  # after the last step


def samples() -> list[Sample]:
    return started.make_samples(SAMPLES, tiny.VOCAB, seed=8)


def train(layout: Layout, folders: dict[str, Path], rank: int) -> Outcome:
    with started.started([*FLAGS, *layout.flags, "--hf-model", str(folders[layout.model])]) as here:
        learner = here.learner()
        micro_batch_size = None if "--max-tokens-per-gpu" in layout.flags else 2
        batches = here.batches(samples(), micro_batch_size)
        with gradients_before_steps(here, learner) as gradients:
            results = [here.update(learner, samples(), micro_batch_size) for _ in range(STEPS)]
        assert all(result.applied for result in results)
        logprobs = [
            started.by_place(batches, [request.tokens["logprobs"] for request in result.requests])
            for result in results
            if learner.is_last_stage
        ]
        weights = here.export()
        return Outcome(
            [result.loss for result in results],
            [result.grad_norm for result in results],
            logprobs,
            gradients if rank == 0 else [],
            weights if rank == 0 else {},
        )


def train_all(rank: int, ranks: int, layouts: list[Layout], folders: dict[str, Path]) -> list[Outcome]:
    outcomes = []
    for layout in layouts:
        try:
            outcomes.append(train(layout, folders, rank))
        except Exception as error:
            error.add_note(f"in the layout: {layout}")
            raise
    return outcomes


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {model: tmp_path_factory.mktemp(model) for model in ALONE}
    for model, folder in made.items():
        tiny.save_hf(model, folder)
    return made


class Results:
    """Outcomes of all ranks by layout; those of as many processes are made when the first is asked for."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._found: dict[Layout, list[Outcome]] = {}
        self._errors: dict[int, BaseException] = {}

    def of(self, layout: Layout, among: list[Layout]) -> list[Outcome]:
        """Every rank's outcome; ``among`` are the layouts to run together."""
        if layout.processes in self._errors and layout not in self._found:
            raise self._errors[layout.processes]
        if layout not in self._found:
            together = [other for other in among if other.processes == layout.processes]
            try:
                by_rank = run_ranks(layout.processes, train_all, together, self._folders, timeout=280)
            except BaseException as error:
                self._errors[layout.processes] = error
                raise
            self._found |= {
                other: list(outcomes) for other, outcomes in zip(together, zip(*by_rank, strict=True), strict=True)
            }
        return self._found[layout]


@pytest.fixture(scope="module")
def results(folders) -> Results:
    return Results(folders)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by norm, in float64."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def merged(outcomes: list[Outcome], step: int) -> started.Values:
    """Log-probabilities of all ranks together. Ranks that hold the same token agree on it."""
    whole: started.Values = {}
    for outcome in outcomes:
        for place, values in outcome.logprobs[step].items() if outcome.logprobs else ():
            mine = whole.setdefault(place, {})
            for position, value in values.items():
                assert mine.setdefault(position, value) == pytest.approx(value, abs=1e-6)
    return whole


def as_vector(values: started.Values) -> torch.Tensor:
    tokens = [values[place][position] for place in sorted(values) for position in sorted(values[place])]
    return torch.tensor(tokens, dtype=torch.float64)


def compare(outcomes: list[Outcome], alone: Outcome) -> dict[str, float]:
    """The largest relative difference of each quantity."""
    worst = dict.fromkeys(("logprobs", "loss", "gradient norm", "gradients", "weights"), 0.0)
    first = outcomes[0]
    for step in range(STEPS):
        found, expected = (merged(group, step) for group in (outcomes, [alone]))
        assert {place: set(values) for place, values in found.items()} == {
            place: set(values) for place, values in expected.items()
        }
        worst["logprobs"] = max(worst["logprobs"], relative(as_vector(found), as_vector(expected)))
        for outcome in outcomes:  # equal on all ranks
            assert (outcome.losses, outcome.grad_norms) == (first.losses, first.grad_norms)
        worst["loss"] = max(worst["loss"], abs(first.losses[step] / alone.losses[step] - 1))
        worst["gradient norm"] = max(worst["gradient norm"], abs(first.grad_norms[step] / alone.grad_norms[step] - 1))
        assert first.gradients[step].keys() == alone.gradients[step].keys()
        for name, gradient in alone.gradients[step].items():
            worst["gradients"] = max(worst["gradients"], relative(first.gradients[step][name], gradient))
    assert first.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        worst["weights"] = max(worst["weights"], relative(first.weights[name], weight))
    return worst


def check(layout: Layout, among: list[Layout], results: Results) -> None:
    (alone,) = results.of(ALONE[layout.model], [*ALONE.values(), *LAYOUTS])
    worst = compare(results.of(layout, [*ALONE.values(), *among]), alone)
    print(layout, {name: f"{value:.1e}" for name, value in worst.items()})
    assert max(worst.values()) <= ROUNDING, worst


def test_the_comparison_sees_one_wrong_number(results):
    """An element of one gradient off by a ten-thousandth of that tensor's norm, and so for the other quantities."""
    (alone,) = results.of(ALONE[DENSE], [*ALONE.values(), *LAYOUTS])
    wrong = 1e-4
    gradients = [dict(step) for step in alone.gradients]
    name = "model.layers.3.mlp.down_proj.weight"
    gradients[2][name] = gradients[2][name].clone()
    gradients[2][name][0, 0] += wrong * gradients[2][name].norm()
    weights = {**alone.weights, name: alone.weights[name] * (1 + wrong)}
    logprobs = [*alone.logprobs[:2], {place: dict(values) for place, values in alone.logprobs[2].items()}]
    values = next(iter(logprobs[2].values()))
    position = next(iter(values))
    values[position] *= 1 + 100 * wrong
    planted = Outcome(
        [*alone.losses[:2], alone.losses[2] * (1 + wrong)],
        [*alone.grad_norms[:2], alone.grad_norms[2] * (1 + wrong)],
        logprobs,
        gradients,
        weights,
    )
    worst = compare([planted], alone)
    assert all(value > ROUNDING for value in worst.values()), worst
    assert not any(compare([alone], alone).values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_gives_one_process_s_numbers(layout, results):
    check(layout, LAYOUTS, results)


@pytest.mark.large
@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_a_large_layout_gives_one_process_s_numbers(layout, results):
    check(layout, LARGE, results)
