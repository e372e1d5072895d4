"""The verdict on mu: right engines pass at every precision, planted faults are refused by name."""

import math
import random
from dataclasses import dataclass

import pytest

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.preflight import TOLERANCE, compare, refuse_mismatch

VOCAB, RESPONSES, LENGTH = 40, 12, 9
NOISE = {"float32": 1e-6, "bf16": 0.03, "fp8": 0.15}  # nat; as measured for a pretrained model
RAW = "its log-probabilities ignore --rl-default-temperature 0.6; serve processed_logprobs"


def _log_softmax(logits: list[float]) -> list[float]:
    total = math.log(math.fsum(map(math.exp, logits)))
    return [logit - total for logit in logits]


@dataclass
class Policy:
    """Random next-token distributions and tokens drawn from them."""

    logits: list[list[list[float]]]  # [response][position][token], at temperature 1
    tokens: list[list[int]]

    def logprobs(self, temperature=1.0, noise=0.0, seed=1):
        """Of the drawn tokens; ``noise`` is the mean absolute rounding error of a log-probability."""
        rng = random.Random(seed)
        return [
            [
                min(0.0, _log_softmax([x / temperature for x in logits])[token] + rng.gauss(0, noise * 1.2533))
                for logits, token in zip(row, tokens, strict=True)
            ]
            for row, tokens in zip(self.logits, self.tokens, strict=True)
        ]


def make_policy(temperature=1.0, seed=0, top_p=1.0):
    rng = random.Random(seed)
    logits = [[[rng.gauss(0, 2) for _ in range(VOCAB)] for _ in range(LENGTH)] for _ in range(RESPONSES)]
    tokens: list[list[int]] = []
    kept_mass: list[list[float]] = []
    for row in logits:
        tokens.append([])
        kept_mass.append([])
        for position in row:
            probs = sorted(((math.exp(x), i) for i, x in enumerate(_log_softmax([x / temperature for x in position]))))
            kept, mass = [], 0.0
            while mass < top_p - 1e-9:
                probability, token = probs.pop()
                kept.append((probability, token))
                mass += probability
            tokens[-1].append(rng.choices([t for _, t in kept], [p for p, _ in kept])[0])
            kept_mass[-1].append(mass)
    return Policy(logits, tokens), kept_mass


def judge(engine, trainer, precision, alternatives=None):
    refuse_mismatch(compare(engine, trainer, precision), engine, trainer, alternatives or {})


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_right_engine_passes(precision, temperature):
    for seed in range(20):
        policy, _ = make_policy(temperature, seed)
        engine = policy.logprobs(temperature, NOISE[precision], seed)
        judge(engine, policy.logprobs(temperature), precision, {RAW: policy.logprobs(1.0)})


@pytest.mark.parametrize("precision", TOLERANCE)
def test_raw_logprobs_are_named(precision):
    for seed in range(20):
        policy, _ = make_policy(0.6, seed)
        engine = policy.logprobs(1.0, NOISE[precision], seed)
        with pytest.raises(RolloutError, match="ignore --rl-default-temperature 0.6"):
            judge(engine, policy.logprobs(0.6), precision, {RAW: policy.logprobs(1.0)})


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_shift_by_one_is_named(precision, side):
    for seed in range(20):
        policy, _ = make_policy(1.0, seed)
        engine = policy.logprobs(1.0, NOISE[precision], seed)
        engine = [[-1.0, *row[:-1]] if side == "before" else [*row[1:], -1.0] for row in engine]
        with pytest.raises(RolloutError, match=f"belong to the token {side}; .* shifted by one"):
            judge(engine, policy.logprobs(), precision)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("top_p", [0.9, 0.6])
def test_truncated_sampling_is_named(precision, top_p):
    for seed in range(20):
        policy, kept = make_policy(1.0, seed, top_p)
        noisy = policy.logprobs(1.0, NOISE[precision], seed)
        engine = [[x - math.log(m) for x, m in zip(*rows, strict=True)] for rows in zip(noisy, kept, strict=True)]
        with pytest.raises(RolloutError, match="--rl-default-top-p 1 --rl-default-top-k 0"):
            judge(engine, policy.logprobs(), precision)


@pytest.mark.parametrize("precision", TOLERANCE)
def test_other_weights_are_refused_without_a_wrong_name(precision):
    policy, _ = make_policy()
    other, _ = make_policy(seed=99)
    engine = Policy(other.logits, policy.tokens).logprobs()
    with pytest.raises(RolloutError, match="no single setting explains it: compare the engine's weights"):
        judge(engine, policy.logprobs(), precision, {RAW: policy.logprobs(0.6)})


def test_the_refusal_is_one_line_with_the_figures():
    with pytest.raises(RolloutError) as caught:
        judge([[-1.0, -2.0]], [[-1.5, -2.0]], "float32")
    assert "\n" not in str(caught.value)
    assert "2.50e-01 nat (largest 5.00e-01) on 2 tokens, where float32 explains 1e-04" in str(caught.value)


def test_few_tokens_are_not_taken_for_a_pattern():
    """All tokens lie above, and the last response would fit better shifted: four tokens do not tell."""
    judge([[-1.0], [-1.5], [-2.0, -2.05]], [[-1.02], [-1.53], [-2.06, -2.08]], "bf16")


def test_responses_of_one_token_can_be_judged():
    with pytest.raises(RolloutError, match="no single setting"):
        judge([[-1.0], [-3.0]], [[-2.0], [-2.0]], "float32")


def test_figures_are_those_of_the_definition():
    engine, trainer = [[-1.0, -2.0], [-0.5]], [[-1.1, -1.7], [-0.5]]
    report = compare(engine, trainer, "float32")
    assert report.tokens == 3
    assert report.mean_difference == pytest.approx(0.4 / 3)
    assert report.median_difference == pytest.approx(0.1)
    assert report.p99_difference == report.max_difference == pytest.approx(0.3)
    assert report.mean_excess == pytest.approx((0.1 - 0.3) / 3)
    assert report.share_below == pytest.approx(1 / 3)
    first, second = abs(math.exp(-1) - math.exp(-1.1)), abs(math.exp(-2) - math.exp(-1.7))
    assert report.mean_tv == pytest.approx((first + second) / 3)
    assert report.max_tv == pytest.approx(max(first, second))
    assert "1.33e-01 nat" in str(report)


@pytest.mark.parametrize(
    ("engine", "trainer", "message"),
    [
        ([], [], "no token"),
        ([[]], [[]], "no token"),
        ([[-1.0, -1.0]], [[-1.0]], "response 0 .* 2 tokens at the engine, 1 here"),
        ([[-1.0], [-1.0, float("nan")]], [[-1.0], [-1.0, -1.0]], "response 1 .* position 1: .* nan at the engine"),
        ([[-1.0]], [[-math.inf]], "-inf at the trainer"),
    ],
)
def test_what_cannot_be_compared_is_refused(engine, trainer, message):
    with pytest.raises(RolloutError, match=message):
        compare(engine, trainer, "float32")
