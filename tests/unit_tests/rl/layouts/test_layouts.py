"""Every layout takes three optimizer steps on the same weights and data, and gives one process's numbers.

Compared are per-token log-probabilities, losses, gradient norms, every gradient tensor and the weights at the end,
all read from the real learner and optimizer. Layouts of as many processes run one after another in one set of them.
"""

from pathlib import Path

import pytest

from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.layouts.table import ALONE, DENSE, LARGE, LAYOUTS, MOE, Layout
from tests.unit_tests.rl.layouts.training import ROUNDING, Outcome, compare, train
from tests.unit_tests.rl.weights import tiny


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
    made = {model: tmp_path_factory.mktemp(model) for model in (DENSE, MOE)}
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


def check(layout: Layout, among: list[Layout], results: Results) -> None:
    (alone,) = results.of(layout.alone, [*ALONE, *LAYOUTS])
    worst = compare(results.of(layout, [*ALONE, *among]), alone)
    print(layout, {name: f"{value:.1e}" for name, value in worst.items()})
    assert max(worst.values()) <= ROUNDING, worst


def test_the_comparison_sees_one_wrong_number(results):
    """An element of one gradient off by a ten-thousandth of that tensor's norm, and so for the other quantities."""
    (alone,) = results.of(Layout(1, DENSE, ""), [*ALONE, *LAYOUTS])
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
        alone.passes,
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
