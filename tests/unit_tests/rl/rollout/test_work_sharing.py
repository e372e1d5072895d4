"""Requests, their division over ranks, and the way back."""

import pytest
import torch.distributed as dist

from megatron.rl.config import SamplingConfig
from megatron.rl.rollout.work_sharing import gather_in_order, make_requests, share_of
from megatron.rl.types import Prompt
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.rollout.tiny import VOCAB, by_id, make_engine, make_model, save

SAMPLING = SamplingConfig(max_new_tokens=6)
LENGTHS = (3, 9, 3, 1, 14, 9, 2)


def _prompts():
    return [
        Prompt(index=100 + i, text="", token_ids=tuple((7 * i + j) % VOCAB for j in range(length)), answer="")
        for i, length in enumerate(LENGTHS)
    ]


def _requests(group_size=3, **changes):
    return make_requests(
        **{"prompts": _prompts(), "sampling": SAMPLING, "seed": 1, "label": "step4"} | changes, group_size=group_size
    )


def test_requests_are_named_and_seeded_by_what_they_are():
    requests = _requests()
    assert len(requests) == 21
    assert len({request.request_id for request in requests}) == 21
    assert len({request.seed for request in requests}) == 21
    assert all(0 <= request.seed < 2**63 for request in requests)
    assert requests[4].request_id == "step4/0001/prompt101/sample1"
    assert requests[4].prompt_ids == _prompts()[1].token_ids
    assert requests == _requests()
    for other in (_requests(seed=2), _requests(label="step5")):
        assert not {request.seed for request in requests} & {request.seed for request in other}


def test_a_larger_group_keeps_the_seeds_of_the_smaller_one():
    small, large = _requests(group_size=2), _requests(group_size=5)
    assert {request.request_id: request.seed for request in small}.items() <= {
        request.request_id: request.seed for request in large
    }.items()


def test_a_prompt_that_comes_twice_has_different_responses():
    prompt = _prompts()[0]
    requests = _requests(prompts=[prompt, prompt])
    assert len({request.request_id for request in requests}) == len({request.seed for request in requests}) == 6


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_shares_are_disjoint_complete_and_even(ranks, group_size):
    requests = _requests(group_size)
    shares = [share_of(requests, rank, ranks) for rank in range(ranks)]
    assert sorted(r.request_id for share in shares for r in share) == sorted(r.request_id for r in requests)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_have_like_prompt_lengths_and_keep_groups_together(ranks):
    requests = _requests(group_size=8)
    shares = [share_of(requests, rank, ranks) for rank in range(ranks)]
    tokens = [sum(len(request.prompt_ids) for request in share) for share in shares]
    assert max(tokens) - min(tokens) <= 8 * max(LENGTHS)
    distinct = sum(len({request.prompt_ids for request in share}) for share in shares)
    assert distinct <= len(LENGTHS) + ranks  # each boundary between ranks splits a group or two, no more


def test_sharing_nothing():
    assert share_of([], 1, 3) == []


def test_results_without_a_group_come_in_request_order():
    requests = _requests()
    results = {request.request_id: request.seed for request in reversed(requests)}
    assert gather_in_order(results, requests, None) == [request.seed for request in requests]
    del results[requests[2].request_id]
    with pytest.raises(RuntimeError, match="sample2 was answered on no rank"):
        gather_in_order(results, requests, None)


def _rollout(rank, ranks, folder):
    requests = _requests()
    with make_engine(folder) as engine:
        mine = by_id(engine.generate(share_of(requests, rank, ranks)))
        completions = gather_in_order(mine, requests, dist.group.WORLD)
        one = requests[:1]  # the other rank has nothing to do
        few = gather_in_order(by_id(engine.generate(share_of(one, rank, ranks))), one, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="on two ranks"):
        gather_in_order({requests[0].request_id: 1}, one, dist.group.WORLD)
    with pytest.raises(RuntimeError, match="on no rank"):
        gather_in_order({}, one, dist.group.WORLD)
    return completions, few, len(mine)


def test_two_processes_sample_what_one_does(tmp_path):
    folder = save(make_model("qwen3-moe"), tmp_path)
    requests = _requests()
    with make_engine(folder) as engine:
        alone = by_id(engine.generate(requests))
    (first, few, count), (second, few_there, other_count) = run_ranks(2, _rollout, folder, timeout=180)
    assert first == second
    assert few == few_there
    assert count + other_count == len(requests)
    assert [completion.request_id for completion in first] == [request.request_id for request in requests]
    for completion in (*first, *few):
        assert completion.token_ids == alone[completion.request_id].token_ids
        assert completion.logprobs == pytest.approx(alone[completion.request_id].logprobs, abs=1e-5)
