"""What every engine must do, alike for transformers in this process, vLLM and SGLang. All in float32."""

from dataclasses import replace

import pytest
import torch

from megatron.rl.config import SamplingConfig
from megatron.rl.errors import CheckpointError, RolloutError
from megatron.rl.rollout.sampling import sampled_logprobs
from megatron.rl.types import GenerationRequest
from tests.engine_tests.rig import EOS, MAX_LENGTH, VOCAB, make_requests

PLAIN = SamplingConfig(max_new_tokens=16)
TOLERANCE = 2e-5  # nat, the largest difference of a token


def expected(rig, completion, sampling, index):
    logits = rig.logits(completion, index)
    if rig.kind == "sglang" and sampling.top_p < 1 and sampling.top_k:
        # SGLang applies top-p to the whole distribution, and keeps what top-k keeps too.
        by_top_p = sampled_logprobs(logits, replace(sampling, top_k=0))
        kept = (by_top_p > -torch.inf) & (sampled_logprobs(logits, replace(sampling, top_p=1.0)) > -torch.inf)
        logprobs = (logits / sampling.temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
    else:
        logprobs = sampled_logprobs(logits, sampling)
    return logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def largest_difference(rig, completions, sampling, index):
    differences = [
        (torch.tensor(completion.logprobs) - expected(rig, completion, sampling, index)).abs().max().item()
        for completion in completions
    ]
    assert len(differences) > 0
    assert all(difference == difference for difference in differences)
    return max(differences)


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        replace(PLAIN, temperature=0.6),
        replace(PLAIN, temperature=1.7),
        replace(PLAIN, top_p=0.7),
        replace(PLAIN, temperature=0.6, top_k=5),
        replace(PLAIN, top_p=0.8, top_k=20),
    ],
    ids=lambda sampling: f"T{sampling.temperature}-p{sampling.top_p}-k{sampling.top_k}",
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(rig, sampling):
    completions = list(rig.engine.generate(make_requests(24, sampling)))
    assert largest_difference(rig, completions, sampling, 0) < TOLERANCE


def test_prompts_come_back_and_every_request_is_answered_once(rig):
    requests = make_requests(120, PLAIN, seed=1)
    completions = list(rig.engine.generate(requests))
    assert sorted(completion.request_id for completion in completions) == sorted(r.request_id for r in requests)
    prompts = {request.request_id: request.prompt_ids for request in requests}
    assert all(completion.prompt_ids == prompts[completion.request_id] for completion in completions)
    assert {version for completion in completions for version in completion.versions} == {rig.engine.version}


def test_the_end_is_the_last_token_and_has_its_own_logprob(rig):
    ends = [EOS, *range(40, 46)]
    with rig.with_ends(ends) as engine:
        completions = list(engine.generate(make_requests(40, PLAIN, seed=2)))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == PLAIN.max_new_tokens
    assert largest_difference(rig, completions, PLAIN, 0) < TOLERANCE


def test_an_end_as_the_only_token_is_a_stop(rig):
    with rig.with_ends(range(VOCAB)) as engine:
        for limit in (1, 8):
            for completion in engine.generate(make_requests(4, replace(PLAIN, max_new_tokens=limit))):
                assert (len(completion.token_ids), completion.finish_reason) == (1, "stop")
                assert completion.logprobs[0] < 0


def test_without_an_end_responses_have_exactly_the_tokens_asked_for(rig):
    with rig.with_ends([VOCAB - 1]) as engine:
        for completion in engine.generate(make_requests(6, replace(PLAIN, top_k=2, max_new_tokens=7))):
            if completion.finish_reason == "length":
                assert len(completion.token_ids) == 7


def test_greedy_takes_the_most_probable_token_with_certainty(rig):
    for completion in rig.engine.generate(make_requests(8, replace(PLAIN, temperature=0.0))):
        logits = rig.logits(completion, 0)
        taken = logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (logits.amax(-1) - taken).max() < 1e-4
        assert set(completion.logprobs) == {0.0}


def test_the_longest_sequence_of_the_model_fits(rig):
    longest = GenerationRequest("longest", tuple(range(3, 63)), replace(PLAIN, max_new_tokens=MAX_LENGTH - 60), seed=3)
    [completion] = rig.engine.generate([longest])
    assert largest_difference(rig, [completion], longest.sampling, 0) < TOLERANCE
    with pytest.raises(RolloutError, match="request longest: 61 prompt tokens"):
        rig.engine.generate([replace(longest, prompt_ids=(*longest.prompt_ids, 3))])


def test_the_seed_decides(rig):
    if rig.kind == "sglang":
        pytest.skip("SGLang's deterministic sampling has no attention backend for CPUs")
    request = make_requests(1, PLAIN)[0]
    seeds = [5, 5, 6, 5 + 2**32, 2**63 - 1]
    requests = [replace(request, request_id=str(index), seed=seed) for index, seed in enumerate(seeds)]
    answers = {completion.request_id: completion.token_ids for completion in rig.engine.generate(requests)}
    assert answers["0"] == answers["1"]
    assert len({answers[key] for key in "0234"}) == 4


def test_siblings_differ(rig):
    completions = list(rig.engine.generate(make_requests(8, PLAIN, group=8)))
    assert len({completion.token_ids for completion in completions}) == 8


def test_an_update_brings_the_new_weights_and_nothing_of_the_old(rig):
    requests = make_requests(24, PLAIN, seed=4)
    list(rig.engine.generate(requests))  # the prefix cache holds these prompts under the old weights
    version = rig.update(1)
    completions = list(rig.engine.generate(requests))
    assert {v for completion in completions for v in completion.versions} == {version}
    assert largest_difference(rig, completions, PLAIN, 1) < TOLERANCE
    assert largest_difference(rig, completions, PLAIN, 0) > 0.1
    rig.update(0)
    assert largest_difference(rig, list(rig.engine.generate(requests)), PLAIN, 0) < TOLERANCE


def test_an_update_in_mid_rollout_leaves_each_token_with_its_version_and_logprob(rig):
    requests = make_requests(60, replace(PLAIN, max_new_tokens=60), seed=5)
    stream = rig.engine.generate(requests)
    completions = [next(stream)]
    new = rig.update(1)
    completions += stream
    assert len(completions) == 60
    versions = [version for completion in completions for version in completion.versions]
    assert new in versions
    assert len(set(versions)) == 2
    for completion in completions:
        by_version = {v: expected(rig, completion, requests[0].sampling, rig.held[v]) for v in set(completion.versions)}
        for position, version in enumerate(completion.versions):
            assert abs(completion.logprobs[position] - by_version[version][position]) < TOLERANCE


def test_an_incomplete_update_is_refused_and_a_complete_one_mends_it(rig):
    name, *rest = rig.weights[1].items()
    with pytest.raises((RolloutError, CheckpointError)):
        rig.engine.update_weights(iter(rest), version=10_000)
    with pytest.raises(RolloutError, match="half updated"):
        rig.engine.generate(make_requests(1, PLAIN))
    rig.update(1)
    completions = list(rig.engine.generate(make_requests(8, PLAIN)))
    assert largest_difference(rig, completions, PLAIN, 1) < TOLERANCE
