"""Objectives of candidates and of whole sequences through the op, on one rank; and what it refuses of them."""

from dataclasses import replace

import pytest
import torch

from megatron.rl.objectives import get_objective
from megatron.rl.ops import TokenError, fused_linear_policy_loss
from tests.unit_tests.rl.ops.reference import Answer, Case, make_case, relative_error
from tests.unit_tests.rl.ops.whole_objectives import candidates_of, gspo_answer, loss_of, topk_answer

FIELDS = ("loss", "logprobs", "entropy", "logsumexp", "grad_hidden", "grad_weight")


def solve(case: Case, **options) -> Answer:
    hidden, weight = (x.clone().requires_grad_(True) for x in (case.hidden, case.weight))
    output = loss_of(replace(case, hidden=hidden, weight=weight), **options)
    output.loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return Answer(output.loss.detach(), output.logprobs, output.entropy, output.logsumexp, hidden.grad, weight.grad)


def assert_as_good(got: Answer, truth: Answer, plain: Answer) -> None:
    for field in FIELDS:
        expected = getattr(truth, field)
        error, measure = (relative_error(getattr(path, field), expected) for path in (got, plain))
        assert error <= 1.1 * measure + 3e-7, f"{field}: {error} against {measure}"


def sequences(tokens: int) -> torch.Tensor:
    """Of all lengths, one token included, interleaved."""
    ids = torch.arange(tokens).float().sqrt().long() * 3
    return ids[torch.randperm(tokens, generator=torch.Generator().manual_seed(0))]


OPTIONS = [
    {},
    {"temperature": 0.6, "entropy_coeff": 0.2},
    {"temperature": torch.linspace(0.5, 1.5, 61), "masked": 0.0},
    {"dtype": torch.bfloat16, "entropy_coeff": 0.1},
    {"masked": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [0, 1, 8])
def test_topk_equals_float64_autograd(options, count):
    case = make_case(61, 24, 97, **options)
    ids, logprobs = candidates_of(case, count)
    truth, plain = topk_answer(case, ids, logprobs), topk_answer(case, ids, logprobs, dtype=None)
    assert_as_good(solve(case, topk_ids=ids, topk_logprobs=logprobs), truth, plain)


def test_topk_of_the_whole_vocabulary_has_the_exact_penalty():
    case = make_case(20, 8, 13, masked=0.2)
    ids = torch.arange(13).expand(20, 13)
    logprobs = torch.randn(20, 13, generator=torch.Generator().manual_seed(0)).log_softmax(1)
    truth, plain = topk_answer(case, ids, logprobs), topk_answer(case, ids, logprobs, dtype=None)
    assert_as_good(solve(case, topk_ids=ids, topk_logprobs=logprobs), truth, plain)


def test_topk_without_candidates_is_drpo_in_pi_minus_mu_squared():
    """With S = {y} the penalty is (pi - mu)^2, mu times DRPO's."""
    case = make_case(31, 8, 53, masked=0.0)
    none = torch.empty(31, 0, dtype=torch.long)
    output = loss_of(case, topk_ids=none, topk_logprobs=none.float())
    mu, advantage = case.behavior_logprobs.exp(), case.advantages
    value = output.ratio * advantage - advantage.abs() / 0.4 * output.tv**2
    torch.testing.assert_close(output.loss, -(case.loss_weights * value).sum())
    assert (mu > 0).all()


@pytest.mark.parametrize("options", OPTIONS)
def test_gspo_equals_float64_autograd(options):
    case = make_case(61, 24, 97, **options)
    ids = sequences(61)
    assert_as_good(solve(case, sequence_ids=ids), gspo_answer(case, ids), gspo_answer(case, ids, dtype=None))


@pytest.mark.parametrize("token_chunk", [None, 1, 10, 61])
def test_gspo_does_not_depend_on_the_chunks(token_chunk):
    case, ids = make_case(61, 24, 97), sequences(61)
    got, expected = solve(case, sequence_ids=ids, token_chunk=token_chunk), solve(case, sequence_ids=ids)
    for field in FIELDS:
        assert relative_error(getattr(got, field), getattr(expected, field)) < 1e-6, field


def test_gspo_without_gradients_computes_none():
    case, ids = make_case(61, 24, 97), sequences(61)
    output = loss_of(case, sequence_ids=ids)
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, solve(case, sequence_ids=ids).loss)


def with_candidates(position: int, ids: list[int], logprobs: list[float]) -> dict[str, torch.Tensor]:
    all_ids, all_logprobs = torch.tensor([[1, 2, 3]] * 9), torch.full((9, 3), -2.0)
    all_ids[position], all_logprobs[position] = torch.tensor(ids), torch.tensor(logprobs)
    return {"topk_ids": all_ids, "topk_logprobs": all_logprobs}


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([1, 31, 2], [-1.0, -1.0, -1.0], r"candidate .* vocabulary.*token 4 .*got 31"),
        ([1, 2, 1], [-1.0, -1.0, -1.0], r"named once.*token 4 .*got 1"),
        ([1, 2, 3], [-1.0, float("nan"), -1.0], r"number below infinity.*token 4 .*got nan"),
        ([1, 2, 3], [-1.0, float("inf"), -1.0], r"number below infinity.*token 4 .*got inf"),
    ],
)
def test_bad_candidate_is_refused_with_its_position(ids, logprobs, message):
    case = make_case(9, 4, 31, masked=0.0)
    with pytest.raises(TokenError, match=message):
        loss_of(case, **with_candidates(4, ids, logprobs))
    case.loss_weights[4] = 0
    loss_of(case, **with_candidates(4, ids, logprobs))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("drpo-topk", {}, "needs topk_ids"),
        ("gspo", {}, "needs sequence_ids"),
        ("drpo", {"sequence_ids": torch.zeros(9)}, "has no use for sequence_ids"),
        ("drpo", {"topk_ids": torch.zeros(9, 1), "topk_logprobs": torch.zeros(9, 1)}, "has no use for topk_ids"),
        ("drpo-topk", {"topk_ids": torch.zeros(9, 1)}, r"\[9, K\] \(got \[9, 1\] and None\)"),
        ("drpo-topk", {"topk_ids": torch.zeros(9, 1), "topk_logprobs": torch.zeros(9, 2)}, r"\[9, K\] .*\[9, 2\]"),
        ("gspo", {"sequence_ids": torch.zeros(8)}, r"sequence_ids must .* 9 tokens \(got \[8\]\)"),
    ],
)
def test_objective_without_what_it_needs_is_refused(name, options, message):
    case = make_case(9, 4, 31, masked=0.0)
    inputs = (case.hidden, case.weight, case.target_ids, case.behavior_logprobs, case.advantages, case.loss_weights)
    with pytest.raises(ValueError, match=message):
        fused_linear_policy_loss(*inputs, get_objective(name), vocab_size=31, **options)
