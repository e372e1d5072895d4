"""What the ops allocate: never tokens x vocabulary, and what the chunk size promises."""

from dataclasses import replace

import pytest
import torch

from megatron.rl.objectives import get_objective
from megatron.rl.ops import fused_linear_logprobs, fused_linear_policy_loss
from tests.unit_tests.rl.ops.memory import Held, measure
from tests.unit_tests.rl.ops.reference import Case, make_case

HIDDEN, VOCABULARY, CHUNK = 32, 8192, 64
CHUNK_BOUND = 16 * CHUNK * VOCABULARY


def loss_of(case: Case, token_chunk: int | None = CHUNK, backward: bool = True):
    def call():
        output = fused_linear_policy_loss(
            case.hidden,
            case.weight,
            case.target_ids,
            case.behavior_logprobs,
            case.advantages,
            case.loss_weights,
            get_objective("drpo"),
            vocab_size=case.vocab_size,
            entropy_coeff=case.entropy_coeff,
            token_chunk=token_chunk,
        )
        if not backward:
            return output
        return torch.autograd.grad(2 * output.loss, (case.hidden, case.weight))

    return call


def case_of(tokens: int, dtype: torch.dtype = torch.float32, **options) -> Case:
    case = make_case(tokens, HIDDEN, VOCABULARY, dtype=dtype, spread=0.1, **options)
    return replace(case, hidden=case.hidden.requires_grad_(True), weight=case.weight.requires_grad_(True))


def held_beyond_gradients(case: Case, call) -> Held:
    gradients = sum(x.numel() * x.element_size() for x in (case.hidden, case.weight))
    held = measure(call)
    return Held(held.peak - gradients, held.after - gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_peak_is_bounded_by_the_chunk_and_flat_over_tokens(dtype, entropy_coeff):
    few, many = (case_of(tokens, dtype, entropy_coeff=entropy_coeff, masked=0.0) for tokens in (128, 1024))
    small, large = (held_beyond_gradients(case, loss_of(case)).peak for case in (few, many))
    assert large <= CHUNK_BOUND
    # A token adds its per-token results and nothing of the vocabulary's or hidden state's size.
    assert large - small <= (1024 - 128) * 128


def test_peak_does_not_depend_on_the_prompts_length():
    short = case_of(128, masked=0.0)
    prompt = 4000
    extended = {
        name: torch.cat([torch.zeros(prompt, *value.shape[1:], dtype=value.dtype), value.detach()])
        for name, value in vars(short).items()
        if isinstance(value, torch.Tensor) and name != "weight"
    }
    long = replace(short, **extended)
    long.hidden.requires_grad_(True)
    peaks = [held_beyond_gradients(case, loss_of(case, token_chunk=None)).peak for case in (short, long)]
    assert peaks[1] - peaks[0] <= prompt * 128


def test_chunk_size_changes_the_peak_in_training():
    case = case_of(1024, masked=0.0)
    peaks = [measure(loss_of(case, token_chunk=chunk)).peak for chunk in (64, 256, 1024)]
    per_token = 4 * VOCABULARY  # one float32 logit each
    assert peaks[1] - peaks[0] >= 0.9 * per_token * (256 - 64)
    assert peaks[2] - peaks[1] >= 0.9 * per_token * (1024 - 256)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.1])
def test_forward_keeps_gradients_but_nothing_of_the_vocabulary_per_token(entropy_coeff):
    case = case_of(512, masked=0.0, entropy_coeff=entropy_coeff)
    held = held_beyond_gradients(case, loss_of(case, backward=False))
    assert held.after <= 512 * 128


def test_entropy_of_the_log_probabilities_keeps_nothing_of_the_vocabulary():
    case = case_of(512, masked=0.0)

    def call():
        return fused_linear_logprobs(
            case.hidden,
            case.weight,
            case.target_ids,
            vocab_size=VOCABULARY,
            return_entropy=True,
            token_chunk=CHUNK,
        )

    held = measure(call)
    assert held.after <= 512 * 128 and held.peak <= CHUNK_BOUND


def test_forward_alone_allocates_no_gradients():
    case = case_of(512, masked=0.0)
    with torch.no_grad():
        held = measure(loss_of(case, token_chunk=1, backward=False))
    assert held.peak <= 512 * 128 + 4 * 4 * VOCABULARY
