"""The one-pass policy loss on one rank, against whole logits in float64."""

from dataclasses import replace

import pytest
import torch

from megatron.rl.errors import ConfigError, DataError
from megatron.rl.objectives import get_objective, token_diagnostics
from megatron.rl.ops import PolicyLossOutput, TokenError, fused_linear_policy_loss
from tests.unit_tests.rl.objectives.reference import FORMULAS
from tests.unit_tests.rl.ops.reference import Answer, Case, answer, make_case, padded, relative_error

NAN, INF = float("nan"), float("inf")


def call(case: Case, name: str = "drpo", **options) -> PolicyLossOutput:
    options = {"vocab_size": case.vocab_size} | options
    return fused_linear_policy_loss(
        case.hidden,
        case.weight,
        case.target_ids,
        case.behavior_logprobs,
        case.advantages,
        case.loss_weights,
        get_objective(name, delta=0.2),
        temperature=case.temperature,
        entropy_coeff=case.entropy_coeff,
        **options,
    )


def solve(case: Case, name: str = "drpo", scale: float = 1.0, **options) -> Answer:
    """The op's results, with the gradients of scale * loss."""
    case = replace(
        case,
        hidden=case.hidden.clone().requires_grad_(True),
        weight=case.weight.clone().requires_grad_(True),
    )
    output = call(case, name, **options)
    (scale * output.loss).backward()
    assert case.hidden.grad is not None and case.weight.grad is not None
    per_token = (output.logprobs, output.entropy, output.logsumexp)
    return Answer(output.loss.detach(), *per_token, case.hidden.grad, case.weight.grad)


def assert_near(got: Answer, expected: Answer, tolerance: float = 1e-5) -> None:
    assert abs(got.loss - expected.loss) < tolerance
    for field in ("logprobs", "entropy", "logsumexp", "grad_hidden", "grad_weight"):
        error = relative_error(getattr(got, field), getattr(expected, field))
        assert error < tolerance, f"{field}: {error}"


@pytest.mark.parametrize("name", FORMULAS)
def test_every_objective(name):
    case = make_case(61, 24, 97)
    assert_near(solve(case, name), answer(case, name))


@pytest.mark.parametrize("masked", [0.0, 0.6])
@pytest.mark.parametrize("token_chunk", [None, 1, 10, 61, 1000])
def test_any_chunk(token_chunk, masked):
    case = make_case(61, 24, 97, masked=masked, entropy_coeff=0.1)
    assert_near(solve(case, token_chunk=token_chunk), answer(case))


@pytest.mark.parametrize("temperature", [0.6, 2.0, torch.linspace(0.5, 1.5, 61), torch.tensor(0.7)])
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.3, -0.3])
def test_temperature_and_entropy(temperature, entropy_coeff):
    per_token = temperature.expand(61) if isinstance(temperature, torch.Tensor) else temperature
    case = make_case(61, 24, 97, temperature=per_token, entropy_coeff=entropy_coeff)
    assert_near(solve(replace(case, temperature=temperature), token_chunk=16), answer(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(507, 123, 1009), (123, 507, 499), (1, 1, 2), (64, 64, 101)])
@pytest.mark.parametrize("token_chunk", [None, 100])
def test_error_is_that_of_the_plain_path(dtype, sizes, token_chunk):
    """The truth is float64; the measure is the path that widens whole logits of the same type to float32."""
    case = make_case(*sizes, dtype=dtype, masked=0.2, temperature=0.6, entropy_coeff=0.1)
    truth, plain, ours = answer(case), answer(case, dtype=None), solve(case, token_chunk=token_chunk)
    assert ours.grad_hidden.dtype == ours.grad_weight.dtype == dtype
    assert ours.loss.dtype == ours.logprobs.dtype == torch.float32
    for field in ("logprobs", "entropy", "logsumexp", "grad_hidden", "grad_weight"):
        expected = getattr(truth, field)
        error, measure = (relative_error(getattr(path, field), expected) for path in (ours, plain))
        # In bfloat16 each of several chunks' products is rounded before their sum is.
        allowed = 1.02 if dtype == torch.bfloat16 and token_chunk is None else 1.1
        assert error <= allowed * measure + 1e-7, f"{field}: {error} against {measure}"
    assert abs(ours.loss - truth.loss) <= 1.1 * abs(plain.loss - truth.loss) + 1e-6


def test_gradient_by_finite_differences():
    """Against the op's own values, without any reference: a step along a random direction."""
    case = make_case(9, 5, 11, masked=0.0, entropy_coeff=0.2, temperature=0.8)
    exact = solve(case)
    generator = torch.Generator().manual_seed(1)
    for field in ("hidden", "weight"):
        direction = torch.randn(getattr(case, field).shape, generator=generator)
        step = 3e-3 * direction
        up, down = (call(replace(case, **{field: getattr(case, field) + s * step})).loss for s in (1, -1))
        slope = (getattr(exact, f"grad_{field}") * direction).sum()
        torch.testing.assert_close((up - down) / 6e-3, slope, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.25, 1024.0])
def test_incoming_scale_multiplies_both_gradients(dtype, scale):
    case = make_case(61, 24, 97, dtype=dtype)
    plain, scaled = solve(case), solve(case, scale=scale)
    assert torch.equal(scaled.grad_hidden, plain.grad_hidden * scale)
    assert torch.equal(scaled.grad_weight, plain.grad_weight * scale)


def test_second_backward_pass_is_refused():
    case = make_case(5, 4, 7)
    loss = call(replace(case, hidden=case.hidden.requires_grad_(True))).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_input_gets_no_gradient(frozen):
    case = make_case(31, 8, 53)
    expected = solve(case)
    trained = "weight" if frozen == "hidden" else "hidden"
    case = replace(case, **{trained: getattr(case, trained).clone().requires_grad_(True)})
    call(case).loss.backward()
    assert getattr(case, frozen).grad is None
    torch.testing.assert_close(getattr(case, trained).grad, getattr(expected, f"grad_{trained}"))


def test_without_gradients_none_are_computed():
    case = make_case(31, 8, 53, entropy_coeff=0.1)
    expected = solve(case)
    with torch.no_grad():
        output = call(replace(case, hidden=case.hidden.requires_grad_(True)))
    assert not output.loss.requires_grad
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logprobs, expected.logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_bitwise_unchanged(dtype):
    case = make_case(61, 24, 97, dtype=dtype, temperature=torch.full((61,), 0.7), entropy_coeff=0.1)
    fields = [field for field, value in vars(case).items() if isinstance(value, torch.Tensor)]
    before = {field: getattr(case, field).clone() for field in fields}
    hidden, weight = case.hidden.requires_grad_(True), case.weight.requires_grad_(True)
    call(case, token_chunk=10).loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    for field in fields:
        kept, now = before[field], getattr(case, field).detach()
        assert torch.equal(kept.isnan(), now.isnan())
        assert torch.equal(kept.nan_to_num(0), now.nan_to_num(0)), field


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_padding_never_enter(dtype):
    case = make_case(61, 24, 97, dtype=dtype, entropy_coeff=0.1)
    bare = solve(case)
    wide = solve(replace(case, weight=padded(case.weight, 64)), vocab_size=97)
    assert_near(wide, replace(bare, grad_weight=padded(bare.grad_weight, 64, fill=0)), 1e-6)
    assert (wide.grad_weight[97:] == 0).all()


@pytest.mark.parametrize("behavior", [-91.0, -INF, NAN])
def test_masked_token_adds_exactly_nothing(behavior):
    case = make_case(20, 8, 31, masked=0.0, entropy_coeff=0.1)
    case.loss_weights[3] = 0
    clean = solve(case)
    case.behavior_logprobs[3], case.advantages[3], case.target_ids[3] = behavior, NAN, -100
    dirty = solve(case)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.grad_weight, dirty.grad_weight) and torch.equal(clean.grad_hidden, dirty.grad_hidden)
    assert (dirty.grad_hidden[3] == 0).all()


def test_masked_hidden_state_is_never_multiplied():
    case = make_case(20, 8, 31, masked=0.0)
    case.loss_weights[3] = 0
    clean = solve(case)
    case.hidden[3] = NAN
    dirty = solve(case)
    assert torch.equal(clean.loss, dirty.loss) and torch.equal(clean.grad_weight, dirty.grad_weight)
    assert (dirty.grad_hidden[3] == 0).all()


@pytest.mark.parametrize(("tokens", "masked"), [(0, 0.0), (7, 1.0)])
def test_no_tokens(tokens, masked):
    case = make_case(tokens, 8, 31, masked=masked, entropy_coeff=0.1)
    got = solve(case)
    assert got.loss == 0 and got.logprobs.shape == (tokens,)
    assert got.grad_hidden.shape == (tokens, 8) and (got.grad_hidden == 0).all()
    assert got.grad_weight.shape == (31, 8) and (got.grad_weight == 0).all()


def test_per_token_results():
    case = make_case(40, 8, 31, masked=0.3)
    output = call(replace(case, hidden=case.hidden.requires_grad_(True)), token_chunk=7)
    keep = case.loss_weights != 0
    logp, logmu, advantage = output.logprobs[keep], case.behavior_logprobs[keep], case.advantages[keep]
    _, slope = get_objective("drpo", delta=0.2)(logp, logmu, advantage)
    expected = token_diagnostics(logp, logmu, advantage, slope)
    for name in ("tv", "ratio", "weight"):
        torch.testing.assert_close(getattr(output, name)[keep], getattr(expected, name))
    for name in ("logprobs", "entropy", "tv", "ratio", "weight", "logsumexp"):
        values = getattr(output, name)
        assert values.dtype == torch.float32 and not values.requires_grad
        assert (values[~keep] == 0).all() and torch.isfinite(values).all()


def test_weight_is_one_without_an_advantage():
    case = make_case(5, 4, 7, masked=0.0)
    case.advantages[2] = 0
    assert call(case).weight[2] == 1


def test_frozen_weights_at_the_sampling_temperature_have_ratio_one():
    case = make_case(40, 8, 31, masked=0.0, temperature=0.6)
    logits = case.hidden @ case.weight.t() / 0.6
    behavior = logits.log_softmax(-1).gather(1, case.target_ids.unsqueeze(1)).squeeze(1)
    output = call(replace(case, behavior_logprobs=behavior))
    torch.testing.assert_close(output.ratio, torch.ones(40), rtol=0, atol=5e-6)
    assert output.tv.max() < 1e-6


@pytest.mark.parametrize("target", [-100, -1, 31, 2**40])
def test_unmasked_target_outside_the_vocabulary_is_refused(target):
    case = make_case(9, 4, 31, masked=0.0)
    case.loss_weights[0] = 0
    case.target_ids[6] = target
    with pytest.raises(TokenError, match=rf"from 0 to 30.*token 6 \(got {target}\)") as refusal:
        call(case)
    assert refusal.value.token == 6 and "\n" not in str(refusal.value)


def test_target_in_the_padding_is_refused():
    case = make_case(9, 4, 31, masked=0.0)
    case.target_ids[2] = 31
    with pytest.raises(TokenError, match="token 2"):
        call(replace(case, weight=padded(case.weight, 64)), vocab_size=31)


@pytest.mark.parametrize("value", [NAN, -INF, INF])
@pytest.mark.parametrize("field", ["behavior_logprobs", "advantages", "loss_weights"])
def test_unmasked_value_that_is_not_finite_is_refused(field, value):
    case = make_case(9, 4, 31, masked=0.0)
    case.loss_weights[0] = 0
    getattr(case, field)[[5, 7]] = value
    with pytest.raises(DataError, match=rf"finite.*token 5, and 1 more \(got {value}\)"):
        call(case)


def test_overflowing_ratio_is_refused_with_its_position():
    case = make_case(9, 4, 31, masked=0.0)
    case.behavior_logprobs[4] = -120
    with pytest.raises(TokenError, match="ratio.*token 4 "):
        call(case)


def test_overflowing_objective_is_refused_with_its_position():
    """SPO's penalty is beyond float32 at a log-ratio of 50, where the ratio itself is not; DRPO's is not."""
    case = make_case(9, 4, 31, masked=0.0)
    case.behavior_logprobs[4] = -60
    call(case)
    with pytest.raises(TokenError, match="objective.*token 4 "):
        call(case, "spo")


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF, torch.tensor([1.0, 0.0, 1.0])])
def test_temperature_that_is_not_positive_is_refused(temperature):
    case = make_case(3, 4, 7)
    with pytest.raises(ConfigError, match=r"temperature .*\(got "):
        call(replace(case, temperature=temperature))


@pytest.mark.parametrize("vocab_size", [0, -3, 8])
def test_vocabulary_size_that_does_not_fit_is_refused(vocab_size):
    with pytest.raises(ConfigError, match=rf"vocab_size .* 7 rows \(got {vocab_size}\)"):
        call(make_case(3, 4, 7), vocab_size=vocab_size)


def test_chunk_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"token_chunk .*\(got 0\)"):
        call(make_case(3, 4, 7), token_chunk=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": torch.zeros(3, 5)},
        {"hidden": torch.zeros(3, 1, 4)},
        {"hidden": torch.zeros(3, 4, dtype=torch.bfloat16)},
        {"hidden": torch.zeros(3, 4).half(), "weight": torch.zeros(7, 4).half()},
        {"advantages": torch.zeros(3, 1)},
        {"target_ids": torch.zeros(4, dtype=torch.long)},
        {"temperature": torch.ones(2)},
    ],
)
def test_shapes_and_types_that_do_not_fit_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must .*\(got "):
        call(replace(make_case(3, 4, 7), **wrong))
