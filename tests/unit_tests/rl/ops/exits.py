"""A program whose ranks call the loss path and end at once, over and over: ``python -m ...ops.exits RUNS CALL``.

Prints one line of exit statuses a run. Imports are made once, then each rank is forked; it ends as any program does,
by the interpreter's own end, which multiprocessing's children skip.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.rl.objectives import get_objective
from megatron.rl.ops import fused_linear_logprobs, fused_linear_policy_loss
from tests.unit_tests.distributed import free_port
from tests.unit_tests.rl.ops.reference import make_case

RANKS, CALLS = 4, 10


def slow_workers_down() -> None:
    """Lets gloo's threads run after the main thread wherever both could, as on a crowded machine."""
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)


def call(name: str, group: dist.ProcessGroup) -> None:
    case = make_case(64, 32, 64)
    sequence_parallel = "sequence-parallel" in name
    hidden, weight = case.hidden, case.weight.chunk(RANKS)[group.rank()].clone()
    if sequence_parallel:
        hidden = hidden.chunk(RANKS)[group.rank()].clone()
    shared = {"vocab_size": 64, "token_chunk": 16, "tp_group": group, "sequence_parallel": sequence_parallel}
    if "without-gradient" not in name:
        hidden.requires_grad_()
        weight.requires_grad_()
    if name.startswith("logprobs"):
        targets = case.target_ids.clamp(min=0)
        loss = fused_linear_logprobs(hidden, weight, targets, **shared).logprobs.sum()
    else:
        per_token = (case.target_ids, case.behavior_logprobs, case.advantages, case.loss_weights)
        loss = fused_linear_policy_loss(hidden, weight, *per_token, get_objective("drpo"), **shared).loss
    if loss.requires_grad:
        loss.backward()


def rank_of_a_run(rank: int, port: int, name: str) -> dist.ProcessGroup:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for done in range(CALLS):
        if done == CALLS - 1:
            slow_workers_down()
        call(name, group)
    dist.destroy_process_group()
    return group


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        port, ranks = free_port(), []
        for rank in range(RANKS):
            if (process := os.fork()) == 0:
                held = rank_of_a_run(rank, port, sys.argv[2])  # a caller's variable, alive to the end
                sys.exit()
            ranks.append(process)
        print(*(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks), flush=True)
