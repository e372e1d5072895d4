"""Tensor parallelism: every layout gives one rank's answer, and d_hidden is complete on all of them.

Each world spawns once and goes through all its cases there. A rank compares its part with the float64 truth.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.rl.errors import ConfigError
from megatron.rl.objectives import get_objective
from megatron.rl.ops import PolicyLossOutput, TokenError, fused_linear_logprobs, fused_linear_policy_loss
from megatron.rl.ops.vocab_shard import VocabShard
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.ops.reference import Answer, Case, answer, make_case, padded, relative_error
from tests.unit_tests.rl.ops.whole_objectives import candidates_of, gspo_answer, loss_of, topk_answer

PER_TOKEN = ("logprobs", "entropy", "tv", "ratio", "weight", "logsumexp")
# In bfloat16 d_weight has one rounding for its chunks' products beside its own; the plain path has its own alone.
ROUNDING_OF_CHUNKS = 1.25
MULTIPLE = 32  # rows to which a vocabulary is padded, all ranks together


def shard_of(case: Case, rank: int, world_size: int, sequence_parallel: bool) -> Case:
    """This rank's inputs, as leaves."""
    weight = padded(case.weight, MULTIPLE).chunk(world_size)[rank].clone().requires_grad_(True)
    hidden = case.hidden.chunk(world_size)[rank] if sequence_parallel else case.hidden
    return replace(case, hidden=hidden.clone().requires_grad_(True), weight=weight)


def local_loss(
    case: Case, local: Case, sequence_parallel: bool, token_chunk: int | None = 7, name: str = "drpo"
) -> PolicyLossOutput:
    return fused_linear_policy_loss(
        local.hidden,
        local.weight,
        local.target_ids,
        local.behavior_logprobs,
        local.advantages,
        local.loss_weights,
        get_objective(name, delta=0.2),
        vocab_size=case.vocab_size,
        temperature=local.temperature,
        entropy_coeff=local.entropy_coeff,
        tp_group=dist.group.WORLD,
        sequence_parallel=sequence_parallel,
        token_chunk=token_chunk,
    )


def local_part(truth: Answer, rank: int, world_size: int, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank's (grad_hidden, grad_weight) must be."""
    grad_weight = padded(truth.grad_weight, MULTIPLE, fill=0).chunk(world_size)[rank]
    return truth.grad_hidden.chunk(world_size)[rank] if sequence_parallel else truth.grad_hidden, grad_weight


def assert_equal_on_all_ranks(values: torch.Tensor) -> None:
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    assert all(torch.equal(values, other) for other in everyone)


def only_last_tokens(case: Case, kept: int) -> Case:
    """The same with all but the last tokens masked: with sequence parallelism one rank holds them all."""
    loss_weights = case.loss_weights.clone()
    loss_weights[:-kept] = 0
    return replace(case, loss_weights=loss_weights)


CASES = {
    "plain": make_case(24, 12, 96),
    "prime vocabulary": make_case(24, 12, 97, entropy_coeff=0.2, temperature=0.6),
    "last rank holds padding only": make_case(24, 12, 65, entropy_coeff=0.2, temperature=torch.linspace(0.5, 1.5, 24)),
    "two words": make_case(24, 12, 2, entropy_coeff=0.2),
    "one token a rank": make_case(4, 12, 31, masked=0.0),
    "prompts on all ranks but the last": only_last_tokens(make_case(24, 12, 97, masked=0.0), 5),
    "nothing masked": make_case(24, 12, 97, masked=0.0, entropy_coeff=0.1),
    "all masked": make_case(24, 12, 97, masked=1.0, entropy_coeff=0.1),
    "no tokens": make_case(0, 12, 97),
    "bfloat16": make_case(64, 48, 331, dtype=torch.bfloat16, entropy_coeff=0.1),
}


def check_policy_loss(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for name, case in CASES.items():
        truth, plain = answer(case), answer(case, dtype=None)
        local = shard_of(case, rank, world_size, sequence_parallel)
        output = local_loss(case, local, sequence_parallel)
        (2 * output.loss).backward()
        assert_equal_on_all_ranks(torch.stack([getattr(output, field) for field in PER_TOKEN]))
        assert_equal_on_all_ranks(output.loss.detach())
        expected_hidden, expected_weight = local_part(truth, rank, world_size, sequence_parallel)
        measure_hidden, measure_weight = local_part(plain, rank, world_size, sequence_parallel)
        pairs = {
            "loss": (output.loss, truth.loss, plain.loss),
            "logprobs": (output.logprobs, truth.logprobs, plain.logprobs),
            "entropy": (output.entropy, truth.entropy, plain.entropy),
            "logsumexp": (output.logsumexp, truth.logsumexp, plain.logsumexp),
            "grad_hidden": (local.hidden.grad / 2, expected_hidden, measure_hidden),
            "grad_weight": (local.weight.grad / 2, expected_weight, measure_weight),
        }
        for field, (got, expected, measure) in pairs.items():
            error = relative_error(got, expected)
            allowed = ROUNDING_OF_CHUNKS * relative_error(measure, expected) + 2e-6
            assert error <= allowed, f"{name}, {field}: {error} > {allowed}"
        assert (output.logprobs <= 0).all()


def gathered(values: torch.Tensor) -> torch.Tensor:
    """All ranks' rows."""
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return torch.cat(everyone)


def check_error(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """At the chunk that is chosen by itself the error is that of the plain path on one rank, whose logits are whole."""
    for dtype, spread in ((torch.bfloat16, 0.5), (torch.bfloat16, 3.0), (torch.float32, 2.0)):
        case = make_case(508, 123, 1009, dtype=dtype, spread=spread, masked=0.2, temperature=0.6, entropy_coeff=0.1)
        truth, plain = answer(case), answer(case, dtype=None)
        local = shard_of(case, rank, world_size, sequence_parallel)
        output = local_loss(case, local, sequence_parallel, token_chunk=None)
        output.loss.backward()
        found = {
            "logprobs": output.logprobs,
            "entropy": output.entropy,
            "logsumexp": output.logsumexp,
            "grad_hidden": gathered(local.hidden.grad) if sequence_parallel else local.hidden.grad,
            "grad_weight": gathered(local.weight.grad)[: case.vocab_size],
        }
        for field, values in found.items():
            error, measure = (relative_error(x, getattr(truth, field)) for x in (values, getattr(plain, field)))
            # Sums of float32 in another order; they explain nothing of a bfloat16 error.
            allowed = 1.02 * measure if dtype == torch.bfloat16 else 1.1 * measure + 1e-7
            assert error <= allowed + 1e-7, f"{dtype}, spread {spread}, {field}: {error} against {measure}"


def check_whole_objectives(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """drpo-topk, whose candidates lie on all ranks, and gspo, whose sequences lie in all chunks and slices."""
    for name in ("plain", "prime vocabulary", "last rank holds padding only", "all masked", "no tokens", "bfloat16"):
        case = CASES[name]
        topk_ids, topk_logprobs = candidates_of(case, 9)
        sequence_ids = torch.arange(len(case.target_ids)) % 5
        problems = {
            "topk": ({"topk_ids": topk_ids, "topk_logprobs": topk_logprobs}, topk_answer, (topk_ids, topk_logprobs)),
            "gspo": ({"sequence_ids": sequence_ids}, gspo_answer, (sequence_ids,)),
        }
        for problem, (options, solve, inputs) in problems.items():
            truth, plain = solve(case, *inputs), solve(case, *inputs, dtype=None)
            local = shard_of(case, rank, world_size, sequence_parallel)
            shared = {"tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel, "token_chunk": 7}
            output = loss_of(local, **options, **shared, vocab_size=case.vocab_size)
            output.loss.backward()
            assert_equal_on_all_ranks(torch.stack([output.logprobs, output.weight, output.loss.expand_as(output.tv)]))
            parts = [local_part(x, rank, world_size, sequence_parallel) for x in (truth, plain)]
            pairs = {
                "loss": (output.loss, truth.loss, plain.loss),
                "grad_hidden": (local.hidden.grad, parts[0][0], parts[1][0]),
                "grad_weight": (local.weight.grad, parts[0][1], parts[1][1]),
            }
            for field, (got, expected, measure) in pairs.items():
                error = relative_error(got, expected)
                allowed = ROUNDING_OF_CHUNKS * relative_error(measure, expected) + 2e-6
                assert error <= allowed, f"{name}, {problem}, {field}: {error} > {allowed}"


def check_logprobs(rank: int, world_size: int, sequence_parallel: bool) -> None:
    for name in ("prime vocabulary", "last rank holds padding only", "no tokens", "bfloat16"):
        case = CASES[name]
        targets = case.target_ids.clamp(min=0)
        slopes = case.loss_weights, case.loss_weights.flip(0)
        whole = shard_of(replace(case, weight=padded(case.weight, MULTIPLE)), 0, 1, False)
        local = shard_of(case, rank, world_size, sequence_parallel)
        results = []
        for inputs, group in ((whole, None), (local, dist.group.WORLD)):
            output = fused_linear_logprobs(
                inputs.hidden,
                inputs.weight,
                targets,
                vocab_size=case.vocab_size,
                temperature=case.temperature,
                return_entropy=True,
                tp_group=group,
                sequence_parallel=sequence_parallel,
                token_chunk=7,
            )
            ((output.logprobs * slopes[0]).sum() + (output.entropy * slopes[1]).sum()).backward()
            results.append(output)
        tolerance = 2e-2 if name == "bfloat16" else 2e-6
        expected_hidden = whole.hidden.grad.chunk(world_size)[rank] if sequence_parallel else whole.hidden.grad
        assert relative_error(local.hidden.grad, expected_hidden) < tolerance, name
        assert relative_error(local.weight.grad, whole.weight.grad.chunk(world_size)[rank]) < tolerance, name
        for field in ("logprobs", "entropy", "logsumexp"):
            assert relative_error(*(getattr(output, field) for output in reversed(results))) < 2e-6, (name, field)


def check_refusals(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """All ranks refuse together: none is left waiting in a collective."""
    good = CASES["nothing masked"]
    bad = []
    for field, value in (("target_ids", 97), ("behavior_logprobs", float("nan")), ("behavior_logprobs", -200.0)):
        values = getattr(good, field).clone()
        values[17] = value
        bad.append(replace(good, **{field: values}))
    for case in bad:
        with pytest.raises(TokenError, match="token 17"):
            local_loss(case, shard_of(case, rank, world_size, sequence_parallel), sequence_parallel)
    with pytest.raises(ConfigError, match="vocab_size"):
        local_loss(replace(good, weight=torch.zeros(129, 12)), shard_of(good, rank, world_size, False), False)


def count_collectives(rank: int, world_size: int, sequence_parallel: bool) -> None:
    """One collective over the vocabulary a chunk, forward; none backward but what completes d_hidden."""
    calls = {"all_gather_into_tensor": 0, "all_reduce": 0, "reduce_scatter_tensor": 0}
    originals = {name: getattr(dist, name) for name in calls}

    def counted(name):
        def call(*args, **kwargs):
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    case = CASES["nothing masked"]  # 24 tokens, 4 chunks of at most 7
    for name in calls:
        setattr(dist, name, counted(name))
    try:
        output = local_loss(case, shard_of(case, rank, world_size, sequence_parallel), sequence_parallel)
        # Under sequence parallelism each chunk's hidden states are gathered, and its d_hidden scattered.
        expected = dict(zip(calls, (8, 0, 4) if sequence_parallel else (4, 4, 0), strict=True))
        assert calls == expected
        output.loss.backward()
        assert calls == expected
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


CHECKS = (
    check_policy_loss,
    check_error,
    check_whole_objectives,
    check_logprobs,
    check_refusals,
    count_collectives,
)


def all_checks(rank: int, world_size: int) -> None:
    for sequence_parallel in (False, True):
        for check in CHECKS:
            try:
                check(rank, world_size, sequence_parallel)
            except Exception as error:
                raise RuntimeError(f"{check.__name__}, sequence_parallel={sequence_parallel}") from error


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_gives_the_answer_of_one_rank(world_size):
    run_ranks(world_size, all_checks, timeout=240)


class OneRank:
    """A process group of one rank; any collective on it would fail."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_group_of_one_rank_needs_no_collective(sequence_parallel):
    case = CASES["prime vocabulary"]
    outputs = [
        fused_linear_logprobs(
            case.hidden,
            case.weight,
            case.target_ids.clamp(min=0),
            vocab_size=case.vocab_size,
            tp_group=group,
            sequence_parallel=sequence_parallel,
        )
        for group in (None, OneRank())
    ]
    assert torch.equal(outputs[0].logprobs, outputs[1].logprobs)


@pytest.mark.parametrize(("vocab_size", "rows"), [(1, 1), (9, 9), (10, 10)])
def test_shard_without_a_group(vocab_size, rows):
    shard = VocabShard.of(torch.zeros(10, 3), vocab_size, None)
    assert (shard.start, shard.rows, shard.size, shard.rank) == (0, rows, 1, 0)
