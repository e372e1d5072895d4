"""Hand-over of the weight's gradient: Megatron's main_grad, tied embeddings, micro-batches."""

import pytest
import torch
from torch.nn import Parameter

from megatron.rl.objectives import get_objective
from megatron.rl.ops import fused_linear_logprobs, fused_linear_policy_loss
from tests.unit_tests.rl.ops.reference import Case, make_case, padded, relative_error


def policy_loss(case: Case, weight: torch.Tensor, hidden: torch.Tensor, token_chunk: int = 16) -> torch.Tensor:
    return fused_linear_policy_loss(
        hidden,
        weight,
        case.target_ids,
        case.behavior_logprobs,
        case.advantages,
        case.loss_weights,
        get_objective("drpo", delta=0.2),
        vocab_size=case.vocab_size,
        token_chunk=token_chunk,
    ).loss


def logprob_loss(case: Case, weight: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    targets = case.target_ids.clamp(min=0)
    output = fused_linear_logprobs(hidden, weight, targets, vocab_size=case.vocab_size, token_chunk=16)
    return (output.logprobs * case.loss_weights).sum()


LOSSES = [policy_loss, logprob_loss]


def plain_gradient(loss, case: Case) -> torch.Tensor:
    weight = Parameter(padded(case.weight, 64))
    loss(case, weight, case.hidden).backward()
    assert weight.grad is not None
    return weight.grad.float()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_gradient_is_added_to_main_grad(loss, dtype, main_dtype, scale):
    case = make_case(61, 24, 97, dtype=dtype)
    expected = plain_gradient(loss, case)
    weight = Parameter(padded(case.weight, 64))
    weight.main_grad = torch.full(weight.shape, 0.5, dtype=main_dtype)
    weight.grad_added_to_main_grad = False
    (scale * loss(case, weight, case.hidden)).backward()
    assert weight.grad_added_to_main_grad
    tolerance = 1e-6 if dtype == main_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(weight.main_grad.float(), 0.5 + scale * expected, rtol=tolerance, atol=tolerance / 2)


def test_scale_loses_no_digits_on_its_way_to_main_grad():
    """One chunk's gradient is held in bfloat16; a scale that is no power of two must multiply it in float32."""
    case = make_case(61, 24, 97, dtype=torch.bfloat16)
    results = []
    for scale in (1.0, 0.3):
        weight = Parameter(case.weight.clone())
        weight.main_grad = torch.zeros(weight.shape)
        (scale * policy_loss(case, weight, case.hidden, token_chunk=100)).backward()
        results.append(weight.main_grad)
    torch.testing.assert_close(results[1], 0.3 * results[0], rtol=1e-6, atol=0)


def scaled_beforehand(case: Case, weight: torch.Tensor, hidden: torch.Tensor, token_chunk: int, scale: float):
    return fused_linear_policy_loss(
        hidden,
        weight,
        case.target_ids,
        case.behavior_logprobs,
        case.advantages,
        case.loss_weights,
        get_objective("drpo", delta=0.2),
        vocab_size=case.vocab_size,
        entropy_coeff=0.1,
        token_chunk=token_chunk,
        grad_scale=scale,
    ).loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_chunk", [16, 100])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_known_scale_needs_no_second_buffer_and_no_pass_over_it(dtype, token_chunk, scale):
    """The forward pass adds to main_grad in place; what the backward pass hands out is scaled already."""
    case = make_case(61, 24, 97, dtype=dtype, entropy_coeff=0.1)
    results = []
    for known in (False, True):
        weight, hidden = Parameter(padded(case.weight, 64)), case.hidden.clone().requires_grad_(True)
        weight.main_grad = torch.full(weight.shape, 0.5)
        weight.grad_added_to_main_grad = False
        if known:
            loss = scaled_beforehand(case, weight, hidden, token_chunk, scale)
            in_forward = weight.main_grad.clone()
            (scale * loss).backward()
            assert torch.equal(weight.main_grad, in_forward)
        else:
            loss = scaled_beforehand(case, weight, hidden, token_chunk, None)
            assert (weight.main_grad == 0.5).all()
            (scale * loss).backward()
        assert weight.grad_added_to_main_grad
        results.append((loss.detach(), hidden.grad, weight.main_grad - 0.5))
    assert torch.equal(results[0][0], results[1][0])
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert relative_error(results[1][1], results[0][1]) < tolerance
    assert relative_error(results[1][2], results[0][2]) < tolerance + 1e-4  # 0.5 hides the last digits


def test_known_scale_without_main_grad_is_applied_as_well():
    case = make_case(61, 24, 97)
    results = []
    for known in (None, 0.3):
        weight, hidden = Parameter(case.weight.clone()), case.hidden.clone().requires_grad_(True)
        (0.3 * scaled_beforehand(case, weight, hidden, 16, known)).backward()
        results.append((hidden.grad, weight.grad))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_other_gradient_than_the_known_one_is_refused():
    case = make_case(9, 4, 31)
    loss = scaled_beforehand(case, Parameter(case.weight.clone()), case.hidden, 16, 2.0)
    with pytest.raises(RuntimeError, match="grad_scale was 2.0, but the loss's gradient is 1.0"):
        loss.backward()


@pytest.mark.parametrize("loss", LOSSES)
def test_main_grad_alone_receives_the_gradient(loss):
    case = make_case(61, 24, 97)
    weight = Parameter(padded(case.weight, 64))
    weight.main_grad = torch.zeros(weight.shape)
    loss(case, weight, case.hidden).backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, plain_gradient(loss, case))


@pytest.mark.parametrize("loss", LOSSES)
def test_main_grad_sums_over_micro_batches_in_float32(loss):
    """A thousandth of the sum, added in bfloat16, would be lost; main_grad is float32."""
    case = make_case(61, 24, 97, dtype=torch.bfloat16)
    weight = Parameter(padded(case.weight, 64))
    weight.main_grad = torch.zeros(weight.shape)
    for scale in (1.0, 1e-3, 1e-3):
        (scale * loss(case, weight, case.hidden)).backward()
    single = Parameter(padded(case.weight, 64))
    single.main_grad = torch.zeros(single.shape)
    loss(case, single, case.hidden).backward()
    assert relative_error(weight.main_grad, 1.002 * single.main_grad) < 1e-4


def data_parallel_hook(weight: Parameter):
    """What megatron-core's data-parallel wrapper does when autograd delivers a parameter's gradient."""

    def hook(*unused):
        assert weight.grad is not None, "the hook of overlapped reduction needs a gradient to be delivered"
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad += weight.grad
        weight.grad = None

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(hook)
    return node


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrapped", [False, True])
def test_tied_embedding_gets_both_gradients(loss, dtype, wrapped):
    case = make_case(61, 24, 97, dtype=dtype)
    ids = torch.arange(61) % 97

    def step(weight):
        (2 * loss(case, weight, case.hidden + torch.nn.functional.embedding(ids, weight))).backward()

    embedding = Parameter(padded(case.weight, 64))
    output = Parameter(padded(case.weight, 64))
    (2 * loss(case, output, case.hidden + torch.nn.functional.embedding(ids, embedding))).backward()
    assert embedding.grad is not None and output.grad is not None
    truth = embedding.grad.double() + output.grad.double()

    weight = Parameter(padded(case.weight, 64))
    if wrapped:
        weight.main_grad = torch.zeros(weight.shape)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True  # megatron-core's mark of a tied weight
        kept = data_parallel_hook(weight)
        step(weight)
        assert kept is not None and weight.grad is None
        got = weight.main_grad
    else:
        step(weight)
        got = weight.grad
    assert relative_error(got, truth) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_untied_weight_under_the_hook_is_counted_once():
    case = make_case(61, 24, 97)
    weight = Parameter(padded(case.weight, 64))
    weight.main_grad = torch.zeros(weight.shape)
    weight.grad_added_to_main_grad = False
    kept = data_parallel_hook(weight)
    policy_loss(case, weight, case.hidden).backward()
    assert kept is not None
    torch.testing.assert_close(weight.main_grad, plain_gradient(policy_loss, case))
