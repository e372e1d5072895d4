"""Optimizer steps against a plain reference, and the same steps in every cut and every parallel layout."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl import assets  # noqa: E402
from megatron.rl.config import LossNormalizationConfig  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402
from tests.unit_tests.rl.weights import tiny  # noqa: E402

DELTA, TEMPERATURE, HORIZON = 0.2, 0.8, 9
# Adam divides by a gradient's own size, so it blows the rounding of a gradient near zero up to a whole step; an eps
# above that rounding keeps the weights comparable.
FLAGS = (
    *("--loss-delta", str(DELTA), "--rl-default-temperature", str(TEMPERATURE), "--lr", "1e-3", "--adam-eps", "1e-3"),
    *("--max-prompt-tokens", "8", "--max-response-tokens", "8", "--train-prompts", str(assets.bundled_train_prompts())),
)
TP2 = ("--tensor-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
VOCAB = {"bundled": 53, "llama-tied": tiny.VOCAB, "qwen3-moe-every-second": tiny.VOCAB}


@dataclass(frozen=True)
class Case:
    """One way to take two updates on the same samples."""

    model: str
    micro_batch: int
    flags: tuple[str, ...] = ()
    samples: int = 13  # prime: some rank and some micro-batch always has a row without a sample
    mode: str = "seq-mean-token-sum-norm"
    entropy_coeff: float = 0.0

    @property
    def task(self) -> tuple[Any, ...]:
        """What decides the result."""
        return self.model, self.samples, self.mode, self.entropy_coeff

    def __str__(self) -> str:
        flags = " ".join(self.flags)
        return f"{self.model} {self.samples}/{self.micro_batch} {self.mode} {self.entropy_coeff} {flags}"


@dataclass(frozen=True)
class Outcome:
    """What a rank saw of a case."""

    losses: list[float]  # of each update
    grad_norms: list[float]
    logprobs: started.Values  # of this rank's sampled tokens in the first update; the last stage's only
    entropies: started.Values
    moved: dict[str, np.ndarray]  # by how much each weight moved in all


WHOLE = Case("bundled", 13)
CUTS = tuple(Case("bundled", size) for size in (1, 3, 5))
ONE_RANK = (
    WHOLE,
    *CUTS,
    Case("bundled", 1, samples=1),
    Case("bundled", 4, mode="token-mean", entropy_coeff=0.05),
    Case("llama-tied", 4),
    Case("qwen3-moe-every-second", 4),
)
TWO_RANKS = (
    Case("bundled", 4),
    Case("bundled", 5, TP2, mode="token-mean", entropy_coeff=0.05),
    Case("bundled", 4, EP2),
    Case("bundled", 3, (*TP2, *EP2, "--expert-tensor-parallel-size", "1")),
    Case("bundled", 3, PP2),
    Case("bundled", 1, EP2, samples=1),  # one of the ranks has no sample at all
    Case("llama-tied", 4, TP2),  # without sequence parallelism
    Case("llama-tied", 4, PP2),  # the tied embedding is on both ranks
    Case("qwen3-moe-every-second", 4, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
)


def _samples(case: Case) -> list:
    return started.make_samples(case.samples, VOCAB[case.model], seed=8)


def _with_tokens(case: Case) -> set[int]:
    """Places of the samples that have a response."""
    return {place for place, sample in enumerate(_samples(case)) if sample.completion.token_ids}


def _outcome(case: Case, folders: dict[str, Path]) -> Outcome:
    with started.started([*FLAGS, "--hf-model", str(folders[case.model]), *case.flags]) as here:
        learner, samples = here.learner(entropy_coeff=case.entropy_coeff), _samples(case)
        normalization = LossNormalizationConfig(case.mode, HORIZON)
        before = here.export()
        results = [here.update(learner, samples, case.micro_batch, normalization) for _ in range(2)]
        assert all(result.applied for result in results)
        moved = {name: (tensor - before[name]).numpy() for name, tensor in here.export().items()}
        return Outcome(
            [result.loss for result in results],
            [result.grad_norm for result in results],
            _by_place(here, learner, samples, case.micro_batch, results[0].requests, "logprobs"),
            _by_place(here, learner, samples, case.micro_batch, results[0].requests, "entropy"),
            moved,
        )


def _by_place(here, learner, samples, micro_batch, requests, name) -> started.Values:
    """A per-token value of this rank's samples; the last stage's only."""
    if not learner.is_last_stage:
        assert all(not request.tokens for request in requests)
        return {}
    return started.by_place(here.batches(samples, micro_batch), [request.tokens[name] for request in requests])


def _passes(folder: Path) -> dict[float, started.Values]:
    """Log-probabilities from passes without gradients, by temperature. They leave the weights as they are."""
    with started.started([*FLAGS, "--hf-model", str(folder)]) as here:
        learner, samples = here.learner(), _samples(WHOLE)
        before = here.export()
        found = {}
        for temperature in (TEMPERATURE, 1.3):
            asked = None if temperature == TEMPERATURE else temperature
            requests = learner.logprobs(here.batches(samples, 3), temperature=asked)
            found[temperature] = _by_place(here, learner, samples, 3, requests, "logprobs")
        assert all(torch.equal(tensor, before[name]) for name, tensor in here.export().items())
        return found


@dataclass(frozen=True)
class Skipped:
    """An update whose gradient is not finite, and the one after it."""

    first: started.UpdateResult
    second: started.UpdateResult
    moved: bool  # by the first
    went_on: bool  # the second moved the weights


def _skipped(flags: tuple[str, ...], fault: float) -> Skipped:
    schedule = ("--lr-decay-style", "linear", "--lr-decay-iters", "50")
    with started.started([*FLAGS, *schedule, "--no-check-for-nan-in-loss-and-grad", *flags]) as here:
        learner, samples = here.learner(), _samples(WHOLE)
        before = here.export()
        norm = next(p for name, p in here.policy.chunks[0].named_parameters() if "input_layernorm" in name)
        injected = norm.register_hook(lambda gradient: gradient * fault)
        first = here.update(learner, samples, 5)
        injected.remove()
        after = here.export()
        second = here.update(learner, samples, 5)
        return Skipped(
            replace(first, requests=[]),
            replace(second, requests=[]),
            any(not torch.equal(tensor, before[name]) for name, tensor in after.items()),
            any(not torch.equal(tensor, after[name]) for name, tensor in here.export().items()),
        )


# Flags, a factor of one gradient in the first update, and whether the second one is applied.
NOT_FINITE: dict[str, tuple[tuple[str, ...], float, bool]] = {
    "a loss scale beyond float32": (("--loss-scale", "1e42"), 1.0, False),
    "an infinite gradient": ((), math.inf, True),
    "NaN in bf16": (("--bf16",), math.nan, True),
}


def _outcomes(rank: int, world_size: int, cases: tuple[Case, ...], folders: dict[str, Path]) -> list[Outcome]:
    return [_outcome(case, folders) for case in cases]


def _outcomes_and_passes(rank: int, world_size: int, cases: tuple[Case, ...], folders: dict[str, Path]) -> tuple:
    skipped = {name: _skipped(flags, fault) for name, (flags, fault, _) in NOT_FINITE.items()}
    return _outcomes(rank, world_size, cases, folders), _passes(folders["bundled"]), skipped


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in VOCAB.keys() - {"bundled"}:
        tiny.save_hf(name, root / name)
    return {name: root / name for name in VOCAB} | {"bundled": assets.bundled_model_dir()}


@pytest.fixture(scope="module")
def one_rank(folders) -> tuple[dict[Case, Outcome], dict[float, dict[int, np.ndarray]], dict[str, Skipped]]:
    [(outcomes, passes, skipped)] = run_ranks(1, _outcomes_and_passes, ONE_RANK, folders)
    return dict(zip(ONE_RANK, outcomes, strict=True)), passes, skipped


@dataclass(frozen=True)
class Reference:
    """The loss of arXiv 2606.09821 eq. 8 in float64, by autograd through a ``transformers`` model."""

    loss: float
    grad_norm: float
    logprobs: list[np.ndarray]
    entropies: list[np.ndarray]


def _hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _reference(folder: Path, case: Case) -> Reference:
    model, samples = _hf_model(folder), _samples(case)
    tokens = sum(len(sample.completion.token_ids) for sample in samples)
    responses = sum(len(sample.completion.token_ids) > 0 for sample in samples)
    divisor = tokens if case.mode == "token-mean" else HORIZON * responses
    gain, logprobs, entropies = torch.zeros((), dtype=torch.float64), [], []
    for sample in samples:
        logp, entropy = started.response_logprobs(model, sample, TEMPERATURE)
        mu = torch.tensor(sample.completion.logprobs, dtype=torch.float64).exp()
        ratio, advantage = logp.exp() / mu, sample.advantage
        j = ratio * advantage - abs(advantage) / (2 * DELTA) * mu * (ratio - 1) ** 2
        gain = gain + (j + case.entropy_coeff * entropy).sum() / divisor
        logprobs.append(logp.detach().numpy())
        entropies.append(entropy.detach().numpy())
    (-gain).backward()
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return Reference(-gain.item(), torch.stack(squares).sum().sqrt().item(), logprobs, entropies)


def _assert_close(found: started.Values, expected: Any) -> None:
    for place, values in found.items():
        whole = expected[place]
        ordered = [whole[key] for key in sorted(whole)] if isinstance(whole, dict) else whole
        np.testing.assert_allclose([values[key] for key in sorted(values)], ordered, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("case", [case for case in ONE_RANK if case not in CUTS], ids=str)
def test_an_update_is_the_papers(one_rank, folders, case):
    outcome, reference = one_rank[0][case], _reference(folders[case.model], case)
    assert outcome.logprobs.keys() == _with_tokens(case)
    _assert_close(outcome.logprobs, reference.logprobs)
    _assert_close(outcome.entropies, reference.entropies)
    assert outcome.losses[0] == pytest.approx(reference.loss, rel=1e-5)
    assert outcome.grad_norms[0] == pytest.approx(reference.grad_norm, rel=1e-5)
    assert outcome.losses[1] < outcome.losses[0]


def test_a_pass_without_gradients_takes_the_temperature_asked_for(one_rank, folders):
    model, samples = _hf_model(folders["bundled"]), _samples(WHOLE)
    for temperature, found in one_rank[1].items():
        with torch.no_grad():
            expected = [started.response_logprobs(model, sample, temperature)[0].numpy() for sample in samples]
        assert found.keys() == _with_tokens(WHOLE)
        _assert_close(found, expected)


@pytest.mark.parametrize("name", NOT_FINITE)
def test_an_update_that_is_not_finite_is_skipped_and_the_next_one_goes_on(one_rank, name):
    skipped = one_rank[2][name]
    assert (skipped.first.applied, skipped.first.grad_norm, skipped.moved) == (False, None, False)
    _, _, goes_on = NOT_FINITE[name]
    assert skipped.second.applied == skipped.went_on == goes_on
    assert (skipped.second.grad_norm is not None) == goes_on
    assert skipped.second.learning_rate == skipped.first.learning_rate, "a skipped update moves no schedule"


def _assert_same(case: Case, outcome: Outcome, expected: Outcome) -> None:
    for name in ("losses", "grad_norms"):
        first, second = getattr(outcome, name)
        assert first == pytest.approx(getattr(expected, name)[0], rel=1e-5), f"{case}: {name}"
        # the second update starts from weights that already differ by rounding
        assert second == pytest.approx(getattr(expected, name)[1], rel=5e-5), f"{case}: {name}"
    assert outcome.moved.keys() == expected.moved.keys()
    for name, moved in expected.moved.items():
        assert np.linalg.norm(outcome.moved[name] - moved) <= 1e-4 * np.linalg.norm(moved), f"{case}: {name}"
    _assert_close(outcome.logprobs, expected.logprobs)


def test_the_cut_into_micro_batches_changes_nothing(one_rank):
    """Not even an empty row: 13 samples in threes or fives leave two."""
    for case in CUTS:
        _assert_same(case, one_rank[0][case], one_rank[0][WHOLE])


def test_every_layout_takes_the_same_steps(one_rank, folders):
    expected = {case.task: outcome for case, outcome in one_rank[0].items()}
    by_rank = run_ranks(2, _outcomes, TWO_RANKS, folders)
    for case, *outcomes in zip(TWO_RANKS, *by_rank, strict=True):
        for outcome in outcomes:
            _assert_same(case, outcome, expected[case.task])
        assert set().union(*(outcome.logprobs for outcome in outcomes)) == _with_tokens(case), case
        assert outcomes[0].losses == outcomes[1].losses and outcomes[0].grad_norms == outcomes[1].grad_norms, case
