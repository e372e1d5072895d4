"""Ranks that are late for each other before training."""

import time
from datetime import timedelta

import pytest
import torch

from megatron.rl.errors import DataError, UserError
from megatron.rl.patience import on_all_ranks, patient_group
from tests.unit_tests.distributed import RankFailure, run_ranks


def _late(rank: int, world_size: int) -> tuple[list[int], timedelta]:
    group = patient_group()

    def work() -> int:
        time.sleep(1.0 if rank == 0 else 0.0)
        return 10 + rank

    return on_all_ranks(work, group), group._get_backend(torch.device("cpu")).options._timeout


def test_ranks_wait_for_the_last_one_and_longer_than_any_training_would():
    assert run_ranks(2, _late) == [([10, 11], timedelta(days=1))] * 2


def _mistaken(rank: int, world_size: int) -> tuple[str, str]:
    def work() -> None:
        if rank == 1:
            raise DataError("prompts.jsonl:7: not JSON")

    with pytest.raises(UserError) as caught:
        on_all_ranks(work, patient_group())
    return type(caught.value).__name__, str(caught.value)


def test_a_users_mistake_on_one_rank_is_told_by_all():
    assert run_ranks(2, _mistaken) == [("DataError", "prompts.jsonl:7: not JSON")] * 2


def _broken(rank: int, world_size: int) -> None:
    def work() -> None:
        if rank == 1:
            raise KeyError("a bug")

    on_all_ranks(work, patient_group())


def test_a_bug_is_the_ranks_own_and_keeps_nobody_waiting():
    with pytest.raises(RankFailure, match="a bug|closed|reset"):
        run_ranks(2, _broken, timeout=60)
