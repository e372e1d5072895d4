"""Spreads a rollout's requests over ranks, and brings the results back in order."""

import hashlib
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.rl.config import SamplingConfig
from megatron.rl.types import GenerationRequest, Prompt


def make_requests(
    prompts: Sequence[Prompt], group_size: int, sampling: SamplingConfig, seed: int, label: str
) -> list[GenerationRequest]:
    """``group_size`` requests a prompt, group after group, with ids such as ``step12/0007/prompt345/sample3``.

    The place of a prompt is part of the id, since a batch across the end of an epoch can hold a prompt twice. A
    request's seed is a hash of ``seed`` and its id, so its response does not depend on the number of ranks.
    """
    requests = []
    for place, prompt in enumerate(prompts):
        for sample in range(group_size):
            request_id = f"{label}/{place:04d}/prompt{prompt.index}/sample{sample}"
            digest = hashlib.sha256(f"{seed}/{request_id}".encode()).digest()
            request_seed = int.from_bytes(digest[:8], "little") >> 1  # servers take signed 64-bit integers
            requests.append(GenerationRequest(request_id, prompt.token_ids, sampling, request_seed))
    return requests


def share_of(requests: Sequence[GenerationRequest], rank: int, ranks: int) -> list[GenerationRequest]:
    """The part of ``requests`` that ``rank`` generates; the parts of all ranks are disjoint and complete.

    Parts differ by one request at most. Prompts are dealt out from the longest to the shortest, each to the rank with
    the fewest prompt tokens so far, and the responses to one prompt stay together where there is room, since an
    engine can read their prompt once.
    """
    groups: dict[tuple[int, ...], list[GenerationRequest]] = {}
    for request in requests:
        groups.setdefault(request.prompt_ids, []).append(request)
    shares: list[list[GenerationRequest]] = [[] for _ in range(ranks)]
    room = [len(requests) // ranks + (index < len(requests) % ranks) for index in range(ranks)]
    tokens = [0] * ranks
    for prompt, group in sorted(groups.items(), key=lambda item: -len(item[0])):
        while group:
            least = min((index for index in range(ranks) if room[index]), key=lambda index: tokens[index])
            taken, group = group[: room[least]], group[room[least] :]
            shares[least] += taken
            room[least] -= len(taken)
            tokens[least] += len(prompt) * len(taken)
    return shares[rank]


def gather_in_order[T](
    mine: Mapping[str, T], requests: Sequence[GenerationRequest], group: ProcessGroup | None
) -> list[T]:
    """Everybody's results, by request id, in the order of ``requests`` on every rank. Collective over ``group``.

    Raises RuntimeError on all ranks where a request has no result, or has two.
    """
    shares: list[Mapping[str, T]] = [mine]
    if group is not None and group.size() > 1:
        shares = [{}] * group.size()
        dist.all_gather_object(shares, dict(mine), group=group)
    everything: dict[str, T] = {}
    for share in shares:
        if twice := everything.keys() & share.keys():
            raise RuntimeError(f"request {min(twice)} was answered on two ranks")
        everything |= share
    if missing := [request.request_id for request in requests if request.request_id not in everything]:
        raise RuntimeError(f"request {missing[0]} was answered on no rank ({len(missing)} in all)")
    return [everything[request.request_id] for request in requests]
