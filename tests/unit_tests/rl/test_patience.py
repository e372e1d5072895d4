"""Ranks that are late for each other before training."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.rl.errors import DataError, UserError
from megatron.rl.patience import meet, on_all_ranks, patient_group
from tests.unit_tests.distributed import RankFailure, free_port, run_ranks


def _late(rank: int, world_size: int) -> tuple[list[int], timedelta]:
    group = patient_group()

    def work() -> int:
        time.sleep(1.0 if rank == 0 else 0.0)
        return 10 + rank

    return on_all_ranks(work, group), group._get_backend(torch.device("cpu")).options._timeout


def test_ranks_wait_for_the_last_one_and_longer_than_any_training_would():
    assert run_ranks(2, _late) == [([10, 11], timedelta(days=1))] * 2


def _meet(rank: int, world_size: int, port: int) -> tuple[bool, list[int]]:
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    time.sleep(1.0 if rank == 0 else 0.0)
    store = meet(rank, world_size)
    assert store is not None
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return meet(rank, world_size) is None, on_all_ranks(lambda: rank, patient_group())


def test_ranks_meet_before_there_is_a_process_group():
    assert run_ranks(2, _meet, free_port()) == [(True, [0, 1])] * 2


def test_one_process_meets_nobody():
    assert meet(0, 1) is None


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
