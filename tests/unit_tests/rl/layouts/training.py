"""Some optimizer steps of a layout, from the real learner and optimizer, and how two layouts' numbers compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl import assets  # noqa: E402
from megatron.rl.types import Sample  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402
from tests.unit_tests.rl.layouts.gradients import Tensors, gradients_before_steps  # noqa: E402
from tests.unit_tests.rl.layouts.table import Layout  # noqa: E402
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
    """What a rank has to show of a layout's steps."""

    losses: list[float]
    grad_norms: list[float]
    logprobs: list[started.Values]  # before each step, of the tokens here; the last pipeline stage's only
    passes: list[started.Values]  # the same before the first step, from a pass without gradients
    gradients: list[Tensors]  # whole, by Hugging Face names; rank 0's only
    weights: Tensors  # after the last step


def samples() -> list[Sample]:
    return started.make_samples(SAMPLES, tiny.VOCAB, seed=8)


def train(layout: Layout, folders: dict[str, Path], rank: int, on: Sequence[Sample] | None = None) -> Outcome:
    """``STEPS`` steps of a layout on :func:`samples`, or ``on`` others. ``folders`` hold the models."""
    on = samples() if on is None else on
    with started.started([*FLAGS, *layout.flags, "--hf-model", str(folders[layout.model])]) as here:
        learner = here.learner()
        micro_batch_size = None if "--max-tokens-per-gpu" in layout.flags else 2
        batches = here.batches(on, micro_batch_size)
        passes = learner.logprobs(batches)
        with gradients_before_steps(here, learner) as gradients:
            results = [here.update(learner, on, micro_batch_size) for _ in range(STEPS)]
        assert all(result.applied for result in results)
        found = [
            started.by_place(batches, [request.tokens["logprobs"] for request in requests])
            for requests in (passes, *(result.requests for result in results))
            if learner.is_last_stage
        ]
        weights = here.export()
        return Outcome(
            [result.loss for result in results],
            [result.grad_norm for result in results],
            found[1:],
            found[:1],
            gradients if rank == 0 else [],
            weights if rank == 0 else {},
        )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference by norm, in float64."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def merged(shares: Sequence[started.Values]) -> started.Values:
    """Log-probabilities of all ranks together. Ranks that hold the same token agree on it."""
    whole: started.Values = {}
    for share in shares:
        for place, values in share.items():
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
    for outcome in outcomes:  # equal on all ranks
        assert (outcome.losses, outcome.grad_norms) == (first.losses, first.grad_norms)
    last_stages = [outcome for outcome in outcomes if outcome.logprobs]
    pairs = [([outcome.passes[0] for outcome in last_stages], alone.passes[0])]
    pairs += [([outcome.logprobs[step] for outcome in last_stages], alone.logprobs[step]) for step in range(STEPS)]
    for shares, expected in pairs:
        found = merged(shares)
        assert {place: set(values) for place, values in found.items()} == {
            place: set(values) for place, values in expected.items()
        }
        worst["logprobs"] = max(worst["logprobs"], relative(as_vector(found), as_vector(expected)))
    for step in range(STEPS):
        worst["loss"] = max(worst["loss"], abs(first.losses[step] / alone.losses[step] - 1))
        worst["gradient norm"] = max(worst["gradient norm"], abs(first.grad_norms[step] / alone.grad_norms[step] - 1))
        assert first.gradients[step].keys() == alone.gradients[step].keys()
        for name, gradient in alone.gradients[step].items():
            worst["gradients"] = max(worst["gradients"], relative(first.gradients[step][name], gradient))
    assert first.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        worst["weights"] = max(worst["weights"], relative(first.weights[name], weight))
    return worst
