"""An objective of whole sequences whose tokens are spread over ranks, against the same in one process."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from megatron.rl.objectives import get_objective
from megatron.rl.ops import fused_linear_policy_loss
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.ops.reference import Case, make_case
from tests.unit_tests.rl.ops.whole_objectives import HIGH, LOW

TOKENS, HIDDEN, VOCAB = 61, 24, 97
PER_TOKEN = ("target_ids", "behavior_logprobs", "advantages", "loss_weights")
# Which tokens rank 0 has: a half, every second one, all, none of the unmasked ones.
SPREADS = {
    "halves": torch.arange(TOKENS) < 30,
    "alternating": torch.arange(TOKENS) % 2 == 0,
    "all on one": torch.ones(TOKENS, dtype=torch.bool),
}


def problem() -> tuple[Case, torch.Tensor]:
    return make_case(TOKENS, HIDDEN, VOCAB), torch.arange(TOKENS) // 7


def solve(
    case: Case, ids: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Loss, per-token values and gradients of the tokens ``mine``."""
    hidden, weight = case.hidden.detach()[mine].requires_grad_(), case.weight.detach().clone().requires_grad_()
    target_ids, *others = (getattr(case, name)[mine] for name in PER_TOKEN)
    output = fused_linear_policy_loss(
        hidden,
        weight,
        target_ids,
        *others,
        get_objective("gspo", eps_low=LOW, eps_high=HIGH),
        vocab_size=VOCAB,
        temperature=case.temperature if isinstance(case.temperature, float) else case.temperature[mine],
        sequence_ids=ids[mine],
        sequence_group=group,
    )
    output.loss.backward()
    values = {field.name: getattr(output, field.name).detach() for field in dataclasses.fields(output)}
    return {**values, "hidden": hidden.grad, "weight_gradient": weight.grad}  # type: ignore[dict-item]


def on_two_ranks(rank: int, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    case, ids = problem()
    group = dist.group.WORLD
    return {name: solve(case, ids, first if rank == 0 else ~first, group) for name, first in SPREADS.items()}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, torch.Tensor]]]:
    return run_ranks(2, on_two_ranks)


@pytest.mark.parametrize("spread", SPREADS)
def test_ranks_together_give_one_process_s_loss_and_gradients(by_rank, spread):
    case, ids = problem()
    whole = solve(case, ids, torch.ones(TOKENS, dtype=torch.bool), None)
    first, second = (found[spread] for found in by_rank)
    mine = SPREADS[spread]
    for name in ("loss", "weight_gradient"):
        torch.testing.assert_close(first[name] + second[name], whole[name], rtol=1e-5, atol=1e-7)
    for name in ("logprobs", "tv", "ratio", "weight", "hidden"):
        torch.testing.assert_close(first[name], whole[name][mine], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(second[name], whole[name][~mine], rtol=1e-5, atol=1e-7)
