"""Faults that users of other trainers reported in their loss paths; each test is named by one report."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.rl.objectives import get_objective
from megatron.rl.ops import PolicyLossOutput, TokenError, fused_linear_logprobs, fused_linear_policy_loss
from megatron.rl.policy.head import HeadRequest, LossInputs, policy_head
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.ops.memory import measure
from tests.unit_tests.rl.ops.reference import Case, answer, make_case, padded, relative_error

NAN, INF = float("nan"), float("inf")
PER_TOKEN = 1024  # bytes that a token may add to the peak: its hidden state and results, no row of the vocabulary


def loss_of(case: Case, **options) -> PolicyLossOutput:
    inputs = (case.hidden, case.weight, case.target_ids, case.behavior_logprobs, case.advantages, case.loss_weights)
    shared = {"vocab_size": case.vocab_size, "temperature": case.temperature, "entropy_coeff": case.entropy_coeff}
    return fused_linear_policy_loss(*inputs, get_objective("drpo", delta=0.2), **(shared | options))


def trained(case: Case) -> Case:
    hidden, weight = (x.clone().requires_grad_(True) for x in (case.hidden, case.weight))
    return replace(case, hidden=hidden, weight=weight)


def train(case: Case, **options) -> tuple[PolicyLossOutput, Case]:
    case = trained(case)
    output = loss_of(case, **options)
    output.loss.backward()
    return output, case


def sharded(case: Case, rank: int, world_size: int, sequence_parallel: bool) -> Case:
    hidden = case.hidden.chunk(world_size)[rank] if sequence_parallel else case.hidden
    return trained(replace(case, hidden=hidden, weight=padded(case.weight, 32).chunk(world_size)[rank]))


def under_tensor_parallelism(rank: int, world_size: int) -> None:
    """Megatron-LM #6700: whole logits on every rank. SkyRL and megatron-core: a partial d_hidden."""
    case = make_case(64, 16, 4093, masked=0.0)
    truth = answer(case)
    for sequence_parallel in (False, True):
        local = sharded(case, rank, world_size, sequence_parallel)
        options = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel, "vocab_size": 4093}
        loss_of(local, **options, token_chunk=8).loss.backward()
        part = truth.grad_hidden.chunk(world_size)[rank] if sequence_parallel else truth.grad_hidden
        assert relative_error(local.hidden.grad, part) < 1e-5
        gradients = 2 * local.weight.numel() * 4
        peak = measure(lambda case=local, options=options: loss_of(case, **options, token_chunk=8).loss.backward()).peak
        assert peak - gradients < 64 * 4093 * 4 / 2


def test_tensor_parallel_ranks_never_hold_whole_logits_and_d_hidden_is_complete():
    run_ranks(2, under_tensor_parallelism)


def test_rows_of_the_prompt_take_no_logits():
    """slime #2253."""
    response = make_case(64, 16, 4096, masked=0.0)
    peaks = []
    for prompt in (0, 2000):
        zeros = torch.zeros(prompt)
        case = replace(
            response,
            hidden=torch.cat([torch.zeros(prompt, 16), response.hidden]),
            target_ids=torch.cat([zeros.long(), response.target_ids]),
            **{
                name: torch.cat([zeros, getattr(response, name)])
                for name in ("behavior_logprobs", "advantages", "loss_weights")
            },
        )
        peaks.append(measure(lambda case=case: train(case)).peak)
    assert peaks[1] - peaks[0] < 2000 * PER_TOKEN


def test_entropy_as_a_metric_keeps_nothing_and_with_a_coefficient_has_its_gradient():
    """slime #1523, TRL PR #6625."""
    case = make_case(256, 16, 4096, masked=0.0)
    held = measure(lambda: loss_of(trained(case), token_chunk=64))
    gradients_and_inputs = 2 * 4 * (case.hidden.numel() + case.weight.numel())
    assert held.after - gradients_and_inputs < 256 * PER_TOKEN
    with_bonus = replace(case, entropy_coeff=0.5)
    _, got = train(with_bonus)
    assert relative_error(got.weight.grad, answer(with_bonus).grad_weight) < 1e-5
    assert relative_error(got.weight.grad, answer(case).grad_weight) > 1e-3


@pytest.mark.parametrize("tied", [False, True])
def test_chunk_setting_changes_the_peak_in_training_and_a_tied_weight_is_trained(tied):
    """NeMo-RL #2871 (the setting was ignored), NeMo-RL PR #2363 (the tied weight was None): through the head."""
    peaks = []
    for chunk in (16, 256):
        case = trained(make_case(256, 16, 4096, masked=0.0))
        row = {name: getattr(case, name).unsqueeze(0) for name in ("behavior_logprobs", "advantages", "loss_weights")}
        request = HeadRequest(
            targets=case.target_ids.unsqueeze(0),
            mask=torch.ones(1, 256, dtype=torch.bool),
            vocab_size=4096,
            temperature=1.0,
            tp_group=None,
            sequence_parallel=False,
            token_chunk=chunk,
            loss=LossInputs(**row, sequence_ids=torch.zeros(1, 256, dtype=torch.int64)),
            objective=get_objective("drpo", delta=0.2),
        )

        def step(case=case, request=request):
            policy_head(
                hidden_states=case.hidden.unsqueeze(1),
                output_layer=SimpleNamespace(weight=None if tied else case.weight),  # type: ignore[arg-type]
                output_weight=case.weight if tied else None,
                context=request,
            ).backward()

        peaks.append(measure(step).peak)
        assert relative_error(case.weight.grad, answer(case).grad_weight) < 1e-5
    assert peaks[1] - peaks[0] > 0.9 * (256 - 16) * 4096 * 4


@pytest.mark.parametrize("vocab_size", [129_920, 129_917, 2, 1])
def test_log_probabilities_are_at_most_zero_at_any_vocabulary_size(vocab_size):
    """verl #2656, #2899: up to +123 at a vocabulary of 129,920."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (20 * torch.randn(n, 4, generator=generator).bfloat16() for n in (9, vocab_size))
    targets = (hidden.float() @ weight.float().t()).argmax(1)
    output = fused_linear_logprobs(hidden, weight, targets, vocab_size=vocab_size, return_entropy=True)
    assert (output.logprobs <= 0).all() and (output.entropy >= -1e-6).all()


def test_inputs_are_not_changed():
    """verl PR #1672, #2484."""
    case = make_case(61, 24, 97, dtype=torch.bfloat16, masked=0.0)
    before = {name: value.clone() for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    trained_case = replace(case, hidden=case.hidden.requires_grad_(True), weight=case.weight.requires_grad_(True))
    loss_of(trained_case, token_chunk=10).loss.backward()
    assert all(torch.equal(getattr(case, name).detach(), value) for name, value in before.items())


def test_rows_of_padding_do_not_shift_the_logsumexp():
    """megatron-core: 512 rows of zeros shift it by 0.16 nat where it is 8."""
    case = make_case(9, 16, 3000, masked=0.0)
    wide = replace(case, weight=torch.cat([case.weight, torch.zeros(512, 16)]))
    assert torch.equal(loss_of(wide, vocab_size=3000).logsumexp, loss_of(case).logsumexp)


def test_unmasked_target_outside_the_vocabulary_is_refused_by_position():
    """megatron-core: a target of -100 silently gives the logsumexp."""
    case = make_case(9, 16, 31, masked=0.0)
    case.target_ids[6] = -100
    with pytest.raises(TokenError, match=r"vocabulary.*token 6 \(got -100\)"):
        loss_of(case)


@pytest.mark.parametrize("behavior", [-91.0, -INF, NAN])
def test_masked_token_adds_exactly_nothing(behavior):
    """prime-rl #2972, NeMo-RL PR #4120: 0 * inf = NaN."""
    case = make_case(20, 8, 31, masked=0.0)
    case.loss_weights[3] = 0
    clean, clean_case = train(case)
    case.behavior_logprobs[3] = behavior
    dirty, dirty_case = train(case)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean_case.weight.grad, dirty_case.weight.grad)


def test_penalty_is_finite_at_a_log_ratio_of_50_and_an_overflowing_ratio_is_refused_with_the_number_of_them():
    """mu (r - 1)^2 is infinite there. A clamp would silence the very tokens that DRPO corrects."""
    case = make_case(9, 4, 31, masked=0.0)
    case.behavior_logprobs[4] = -50 + loss_of(case).logprobs[4]
    output, got = train(case)
    assert torch.isfinite(output.loss) and torch.isfinite(got.weight.grad).all()
    assert output.ratio[4] > 1e21
    case.behavior_logprobs[4:6] = -200
    with pytest.raises(TokenError, match=r"ratio.*token 4, and 1 more"):
        loss_of(case)


def test_ratio_is_one_at_the_sampling_temperature_with_frozen_weights():
    """TRL #4159, NeMo-RL PR #935: the temperature was the engine's alone."""
    case = make_case(40, 8, 31, masked=0.0, temperature=0.6)
    logits = case.hidden.double() @ case.weight.double().t() / 0.6
    sampled = logits.log_softmax(1).gather(1, case.target_ids.unsqueeze(1)).squeeze(1)
    output = loss_of(replace(case, behavior_logprobs=sampled.float()))
    torch.testing.assert_close(output.ratio, torch.ones(40), rtol=1e-5, atol=0)
    assert (output.tv < 1e-6).all()
