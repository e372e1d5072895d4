"""The embedded engine against the definition: one full pass of the model over prompt and response."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.rl.config import SamplingConfig
from megatron.rl.errors import CheckpointError, RolloutError
from megatron.rl.rollout.hf import HFEngine
from megatron.rl.rollout.sampling import draw_tokens, sampled_logprobs
from megatron.rl.types import GenerationRequest
from megatron.rl.weights import load_into_hf_model
from tests.unit_tests.rl.rollout.tiny import (
    EOS,
    FAMILIES,
    PAD,
    VOCAB,
    by_id,
    logits_of,
    make_engine,
    make_model,
    make_requests,
    save,
)

PLAIN = SamplingConfig(max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(make_model("qwen3-moe"), tmp_path_factory.mktemp("qwen3-moe"))


@pytest.fixture(scope="module")
def engine(folder):
    with make_engine(folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [PLAIN, replace(PLAIN, temperature=0.6), replace(PLAIN, top_p=0.8, top_k=20)])
def test_logprobs_are_those_of_a_full_pass(family, sampling, tmp_path):
    model = make_model(family)
    completions = list(make_engine(save(model, tmp_path)).generate(make_requests(14, sampling)))
    assert len({len(completion.token_ids) for completion in completions}) > 1  # rows were dropped on the way
    for completion in completions:
        expected = sampled_logprobs(logits_of(model, completion), sampling)
        expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampling", [PLAIN, replace(PLAIN, temperature=0.6, top_p=0.9)])
def test_a_response_does_not_depend_on_its_batch(folder, engine, sampling):
    requests = make_requests(23, sampling)
    together = by_id(engine.generate(requests))
    in_sevens = by_id(make_engine(folder, max_batch_size=7).generate(requests[::-1]))
    alone = {request.request_id: next(engine.generate([request])) for request in requests}
    for request_id, completion in alone.items():
        for other in (together[request_id], in_sevens[request_id]):
            assert other.token_ids == completion.token_ids
            assert other.finish_reason == completion.finish_reason
            torch.testing.assert_close(
                torch.tensor(other.logprobs), torch.tensor(completion.logprobs), atol=1e-5, rtol=0
            )


def test_the_seed_decides_and_all_of_its_bits_count(engine):
    request = make_requests(1, PLAIN)[0]
    seeds = [5, 5, 6, 5 + 2**32, 2**63 - 1]
    requests = [replace(request, request_id=str(index), seed=seed) for index, seed in enumerate(seeds)]
    answers = by_id(engine.generate(requests))
    assert answers["0"].logprobs == answers["1"].logprobs
    assert answers["0"].token_ids == answers["1"].token_ids
    assert len({answers[key].token_ids for key in "0234"}) == 4


def test_requests_with_different_sampling_share_a_call(engine):
    settings = [PLAIN, replace(PLAIN, temperature=0.0), replace(PLAIN, max_new_tokens=1), replace(PLAIN, top_k=1)]
    request = make_requests(1, PLAIN)[0]
    requests = [replace(request, request_id=str(i), sampling=sampling) for i, sampling in enumerate(settings)]
    together = by_id(engine.generate(requests))
    for mixed in requests:
        assert together[mixed.request_id].token_ids == next(engine.generate([mixed])).token_ids
    assert together["1"].token_ids == together["3"].token_ids  # greedy is top_k = 1


def test_greedy_takes_the_most_probable_tokens_with_certainty(engine, model):
    for completion in engine.generate(make_requests(6, replace(PLAIN, temperature=0.0))):
        assert list(completion.token_ids) == logits_of(model, completion).argmax(-1).tolist()
        assert set(completion.logprobs) == {0.0}


def test_truncated_sampling_stays_in_the_kept_set(engine, model):
    sampling = replace(PLAIN, top_p=0.7, top_k=4)
    drawn = 0
    for completion in engine.generate(make_requests(12, sampling)):
        kept = sampled_logprobs(logits_of(model, completion), sampling) > -torch.inf
        assert kept.gather(-1, torch.tensor(completion.token_ids)[:, None]).all()
        assert kept.sum(-1).max() <= 4
        drawn += len(completion.token_ids)
    assert drawn > 20


def test_end_of_sequence_is_the_last_token_and_no_other(folder):
    ends = (EOS, 7, 11, 13)
    completions = list(make_engine(folder, eos_token_ids=ends).generate(make_requests(30, PLAIN)))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.token_ids[-1] in ends) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == PLAIN.max_new_tokens


def test_end_of_sequence_as_first_token(folder):
    for completion in make_engine(folder, eos_token_ids=range(VOCAB)).generate(make_requests(5, PLAIN)):
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 1
        assert completion.finish_reason == "stop"
        assert completion.logprobs[0] < 0


def test_end_of_sequence_at_the_limit_is_a_stop(folder):
    one = replace(PLAIN, max_new_tokens=1)
    [completion] = make_engine(folder, eos_token_ids=range(VOCAB)).generate(make_requests(1, one))
    assert completion.finish_reason == "stop"
    [completion] = make_engine(folder, eos_token_ids=[]).generate(make_requests(1, one))
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 1)


def test_padding_goes_by_position_not_by_token(folder):
    long = GenerationRequest("long", (9,) * 8, PLAIN, seed=1)
    for pad in (PAD, EOS, 33):
        with_pad_inside = GenerationRequest("inside", (pad, 4, pad), PLAIN, seed=2)
        engine = make_engine(folder, pad_token_id=pad)
        [alone] = engine.generate([with_pad_inside])
        assert by_id(engine.generate([with_pad_inside, long]))["inside"].token_ids == alone.token_ids


def test_no_requests(engine):
    assert list(engine.generate([])) == []


def test_the_last_position_of_the_model_can_be_used_and_no_further(engine):
    sampling = replace(PLAIN, max_new_tokens=60)
    fits = GenerationRequest("fits", (3, 4, 5, 6), sampling, seed=0)
    assert list(engine.generate([fits]))
    with pytest.raises(RolloutError, match="request long: 5 prompt tokens .* 64 positions"):
        engine.generate([replace(fits, request_id="long", prompt_ids=(3, 4, 5, 6, 7))])


def test_completions_come_as_they_finish(engine):
    lengths = [len(completion.token_ids) for completion in engine.generate(make_requests(40, PLAIN))]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_callers_keep_their_gradients_between_completions(engine):
    stream = engine.generate(make_requests(4, PLAIN))
    next(stream)
    assert not torch.is_inference_mode_enabled()
    weight = torch.ones(1, requires_grad=True)
    (2 * weight).backward()
    assert weight.grad is not None
    stream.close()


def _hub_tensors(model):
    """The model's tensors under the names of its files."""
    for name, tensor in model.state_dict().items():
        if name.endswith("gate_up_proj"):
            for index, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                yield name.replace("gate_up_proj", f"{index}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{index}.up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            for index, expert in enumerate(tensor):
                yield name.replace("down_proj", f"{index}.down_proj.weight"), expert
        else:
            yield name, tensor


def test_an_update_brings_exactly_the_new_weights(folder):
    other = make_model("qwen3-moe", seed=1)
    requests = make_requests(9, PLAIN)
    with make_engine(folder) as engine:
        before = by_id(engine.generate(requests))
        assert engine.version == 0
        engine.update_weights(_hub_tensors(other), version=5)
        assert engine.version == 5
        after = by_id(engine.generate(requests))
    assert sum(before[key].token_ids != after[key].token_ids for key in before) >= 8
    for completion in after.values():
        assert set(completion.versions) == {5}
        expected = logits_of(other, completion).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_each_token_carries_the_version_that_sampled_it(folder):
    with make_engine(folder, max_batch_size=4, version=3) as engine:
        stream = engine.generate(make_requests(8, PLAIN))
        first = [next(stream) for _ in range(4)]
        engine.update_weights(_hub_tensors(make_model("qwen3-moe", seed=1)), version=4)
        assert {version for completion in first for version in completion.versions} == {3}
        assert {version for completion in stream for version in completion.versions} == {4}


def test_an_update_between_two_tokens_of_a_batch(folder, model):
    other, new = make_model("qwen3-moe", seed=1), 0
    with make_engine(folder, version=3) as engine:
        stream = engine.generate(make_requests(30, PLAIN))
        completions = [next(stream)]
        engine.update_weights(_hub_tensors(other), version=4)
        completions += stream
    for completion in completions:
        assert list(completion.versions) == sorted(completion.versions)
        for version, judge in ((3, model), (4, other)):
            expected = logits_of(judge, completion).log_softmax(-1)
            expected = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            of_version = torch.tensor(completion.versions) == version
            assert ((torch.tensor(completion.logprobs) - expected)[of_version].abs() < 1e-5).all()
            new += int(of_version.sum()) if version == 4 else 0
    assert new > 50


def test_an_incomplete_update_stops_the_engine(folder):
    tensors = list(_hub_tensors(make_model("qwen3-moe", seed=1)))
    with make_engine(folder) as engine:
        with pytest.raises(CheckpointError):
            engine.update_weights(iter(tensors[:-1]), version=1)
        with pytest.raises(RolloutError, match="half updated"):
            engine.generate(make_requests(1, PLAIN))
        engine.update_weights(iter(tensors), version=1)
        assert len(list(engine.generate(make_requests(3, PLAIN)))) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_policy_that_diverged_is_refused_by_request_and_position(folder, temperature):
    def poison(model, tensors):
        with torch.no_grad():
            model.get_output_embeddings().weight[3] = torch.nan

    with make_engine(folder, load_tensors=poison) as engine:
        engine.update_weights(iter(()), version=1)
        with pytest.raises(RolloutError, match="request r0: the model's logits at position 0 .* not finite"):
            list(engine.generate(make_requests(1, replace(PLAIN, temperature=temperature))))


def test_experts_give_what_their_own_loop_gives(engine, model):
    ids = torch.randint(VOCAB, (7, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours = engine._open_model()(input_ids=ids).logits.log_softmax(-1)
        eager = model(input_ids=ids).logits.log_softmax(-1)
    torch.testing.assert_close(ours, eager, atol=1e-6, rtol=1e-6)


def test_bf16_weights_still_give_float32_logprobs(folder):
    engine = make_engine(folder, dtype=torch.bfloat16)
    values = [logprob for completion in engine.generate(make_requests(4, PLAIN)) for logprob in completion.logprobs]
    assert any(torch.tensor(value).bfloat16().item() != value for value in values)


def test_equal_prompts_pass_through_the_model_once(engine, monkeypatch):
    shapes = []
    forward = type(engine._open_model()).forward

    def record(self, input_ids, **options):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(type(engine._open_model()), "forward", record)
    requests = make_requests(12, replace(PLAIN, max_new_tokens=2), group=4)
    list(engine.generate(requests))
    assert shapes[0] == (3, max(len(request.prompt_ids) for request in requests))
    assert shapes[1][1] == 1


def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path):
    with pytest.raises(RolloutError, match="config.json is missing"):
        make_engine(tmp_path / "nowhere")


def test_special_tokens_outside_the_vocabulary_are_refused(folder):
    with pytest.raises(RolloutError, match=f"special token {VOCAB} is outside"):
        make_engine(folder, eos_token_ids=[EOS, VOCAB])


def test_a_closed_engine_is_not_asked(folder):
    engine = HFEngine(folder, load_tensors=load_into_hf_model, eos_token_ids=[EOS], pad_token_id=PAD)
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(engine.generate(make_requests(1, PLAIN)))


def test_drawing_follows_the_requests_own_random_numbers(engine, model):
    """The stream of uniforms is Python's generator of the request's seed: stable over versions and platforms."""
    import random

    request = make_requests(1, PLAIN)[0]
    [completion] = engine.generate([request])
    source = random.Random(request.seed)
    uniforms = torch.tensor([1 - source.random() for _ in completion.token_ids], dtype=torch.float64)
    tokens, _ = draw_tokens(logits_of(model, completion), uniforms, PLAIN)
    assert tuple(tokens.tolist()) == completion.token_ids
