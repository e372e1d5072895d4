"""The contract of all engines: what they refuse, and what is refused of them."""

from dataclasses import replace

import pytest
import torch

from megatron.rl.config import SamplingConfig
from megatron.rl.errors import RolloutError
from megatron.rl.rollout.engine import RolloutEngine, check_completion
from megatron.rl.types import Completion, GenerationRequest

SAMPLING = SamplingConfig(max_new_tokens=4)
REQUEST = GenerationRequest("step1/prompt3/sample0", (5, 6), SAMPLING, seed=1)
TENSORS = [("a", torch.zeros(1)), ("b", torch.ones(1))]
GOOD = Completion("step1/prompt3/sample0", (5, 6), (7, 2), (-0.5, 0.0), "stop", (0, 0))


class ScriptedEngine(RolloutEngine):
    """Answers with what it was given."""

    def __init__(self, answers=(), load_error=None):
        super().__init__(vocab_size=10, max_length=8)
        self.answers = answers
        self.load_error = load_error
        self.loaded = []
        self.is_closed = False

    def _generate(self, requests):
        yield from self.answers

    def _load(self, tensors, version):
        self.loaded.append(next(tensors))
        if self.load_error:
            raise self.load_error
        self.loaded += tensors

    def close(self):
        self.is_closed = True


def test_a_good_completion_passes_and_comes_back_as_it_is():
    assert list(ScriptedEngine([GOOD]).generate([REQUEST])) == [GOOD]


def test_no_requests_no_completions():
    assert list(ScriptedEngine().generate([])) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": (-0.5, float("nan"))}, r"step1/prompt3/sample0: position 1 \(token 2\).* nan"),
        ({"logprobs": (-float("inf"), -0.1)}, r"position 0 \(token 7\).* -inf"),
        ({"logprobs": (None, -0.1)}, "position 0 .* None"),
        ({"logprobs": (-0.5, 0.25)}, "position 1 .* 0.25"),
        ({"logprobs": (-0.5,)}, "2 tokens came with 1 log-probabilities"),
        ({"versions": (0,)}, "2 tokens .* 1 policy versions"),
        ({"token_ids": (7, 10)}, r"position 1 has token 10, outside \[0, 10\)"),
        ({"token_ids": (-1, 2)}, "position 0 has token -1"),
        ({"prompt_ids": (1, 5, 6)}, "changed the prompt's token ids"),
        ({"prompt_ids": (5, 7)}, "changed the prompt's token ids"),
        ({"token_ids": (), "logprobs": (), "versions": ()}, "the response is empty"),
        ({"token_ids": (1,) * 5, "logprobs": (-1.0,) * 5, "versions": (0,) * 5}, "5 tokens are more than the 4"),
    ],
)
def test_a_broken_completion_is_refused_by_name(change, message):
    with pytest.raises(RolloutError, match=message) as caught:
        list(ScriptedEngine([replace(GOOD, **change)]).generate([REQUEST]))
    assert "\n" not in str(caught.value)
    assert "step1/prompt3/sample0" in str(caught.value)


def test_an_aborted_request_may_have_no_token():
    aborted = replace(GOOD, token_ids=(), logprobs=(), versions=(), finish_reason="abort")
    check_completion(REQUEST, aborted, vocab_size=10)


def test_an_answer_that_never_came_that_came_twice_or_that_nobody_asked_for_is_refused():
    with pytest.raises(RolloutError, match="step1/prompt3/sample0: the engine gave no answer"):
        list(ScriptedEngine([]).generate([REQUEST]))
    with pytest.raises(RolloutError, match="answered twice"):
        list(ScriptedEngine([GOOD, GOOD]).generate([REQUEST]))
    with pytest.raises(RolloutError, match="other: answered twice, or never asked"):
        list(ScriptedEngine([replace(GOOD, request_id="other")]).generate([REQUEST]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": ()}, "the prompt has no token"),
        ({"prompt_ids": (5, 10)}, r"prompt ids must be in \[0, 10\).*\(got 10\)"),
        ({"prompt_ids": (-2, 5)}, r"\(got -2\)"),
        ({"prompt_ids": (1,) * 5}, r"5 prompt tokens \+ up to 4 new ones exceed the model's 8 positions"),
        ({"sampling": replace(SAMPLING, max_new_tokens=0)}, "max_new_tokens"),
        ({"sampling": replace(SAMPLING, temperature=-1.0)}, "temperature"),
        ({"sampling": replace(SAMPLING, temperature=float("nan"))}, "temperature"),
        ({"sampling": replace(SAMPLING, top_p=0.0)}, "top_p"),
        ({"sampling": replace(SAMPLING, top_p=1.5)}, "top_p"),
        ({"sampling": replace(SAMPLING, top_k=-1)}, "top_k"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_any_work(change, message):
    with pytest.raises(RolloutError, match=message):
        ScriptedEngine([GOOD]).generate([replace(REQUEST, **change)])  # not iterated


def test_two_requests_with_one_id_are_a_bug_of_the_caller():
    with pytest.raises(ValueError, match="repeat the id"):
        ScriptedEngine([GOOD]).generate([REQUEST, REQUEST])


def test_a_failed_update_stops_the_engine_until_one_succeeds():
    engine = ScriptedEngine([GOOD], load_error=ConnectionError("gone"))
    with pytest.raises(ConnectionError):
        engine.update_weights(iter(TENSORS), version=7)
    with pytest.raises(RolloutError, match="half updated"):
        engine.generate([REQUEST])
    with pytest.raises(RolloutError, match="half updated"):
        _ = engine.version
    engine.load_error = None
    engine.update_weights(iter(TENSORS), version=8)
    assert engine.version == 8
    assert engine.loaded[-2:] == TENSORS
    assert list(engine.generate([REQUEST])) == [GOOD]


def test_leaving_the_context_closes_the_engine_also_after_an_error():
    engine = ScriptedEngine()
    with pytest.raises(KeyError), engine:
        raise KeyError
    assert engine.is_closed
