"""Rollouts: order, sharing over ranks, scoring while the engine still samples."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest
import torch.distributed as dist
from tokenizers import AddedToken
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from megatron.rl.collector import Collector, control_tokens, response_text
from megatron.rl.config import SamplingConfig
from megatron.rl.errors import RolloutError
from megatron.rl.rewards import Scorer
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.types import Completion, FinishReason, GenerationRequest, Prompt, RewardItem, RewardResult
from tests.unit_tests.distributed import run_ranks

VOCAB, EOS = 50, 1
SAMPLING = SamplingConfig(max_new_tokens=5)
PROMPTS = [Prompt(10 + i, f"p{i}", tuple(range(2, 3 + n)), f"answer{i}") for i, n in enumerate((4, 1, 7, 2, 2))]


class StubEngine(RolloutEngine):
    """Answers by the request's seed alone, the last request first."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(vocab_size=VOCAB, max_length=64)
        self.log = log

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        for request in reversed(requests):
            tokens = tuple(2 + (request.seed >> 8 * i) % (VOCAB - 2) for i in range(1 + request.seed % 3)) + (EOS,)
            self.log.append(f"sampled {request.request_id}")
            yield Completion(
                request.request_id, request.prompt_ids, tokens, (-0.5,) * len(tokens), "stop", (3,) * len(tokens)
            )

    def _load(self, tensors: object) -> None: ...
    def close(self) -> None: ...


class StubScorer(Scorer):
    """Scores by the response's length and keeps what it was given."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.items: list[RewardItem] = []

    def submit(self, item: RewardItem) -> Future[RewardResult]:
        self.log.append("scoring")
        self.items.append(item)
        future: Future[RewardResult] = Future()
        future.set_result(RewardResult(len(item.response) + item.prompt.index / 100))
        return future


class StubTokenizer:
    """Letters for tokens."""

    special_tokens_map: dict[str, str] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(chr(64 + token) for token in token_ids)


def _collector(group: dist.ProcessGroup | None = None, seed: int = 5) -> tuple[Collector, StubScorer]:
    log: list[str] = []
    scorer = StubScorer(log)
    return Collector(StubEngine(log), scorer, StubTokenizer(), seed=seed, group=group), scorer


def _scored(group: dist.ProcessGroup | None = None, seed: int = 5, label: str = "step1") -> list:
    collector, _ = _collector(group, seed)
    return collector.scored(collector.sample(PROMPTS, 3, SAMPLING, label))


def test_results_come_group_after_group_whatever_the_engines_order():
    results = _scored()
    assert [prompt.index for prompt, _, _ in results] == [index for index in (10, 11, 12, 13, 14) for _ in range(3)]
    for place, (prompt, completion, reward) in enumerate(results):
        assert completion.request_id == f"step1/{place // 3:04d}/prompt{prompt.index}/sample{place % 3}"
        assert completion.prompt_ids == prompt.token_ids
        assert reward.score == len(completion.token_ids) - 1 + prompt.index / 100


def test_scorers_get_text_without_its_end_while_the_engine_samples_on():
    collector, scorer = _collector()
    collector.sample(PROMPTS[:2], 2, SAMPLING, "step1")
    kinds = [entry.split()[0] for entry in scorer.log]
    assert kinds == ["sampled", "scoring"] * 4
    assert len(scorer.items) == 4
    assert all(chr(64 + EOS) not in item.response and item.response for item in scorer.items)
    assert {item.prompt.answer for item in scorer.items} == {"answer0", "answer1"}


def test_seed_and_occasion_decide_the_responses():
    def tokens(results: list) -> list:
        return [completion.token_ids for _, completion, _ in results]

    assert tokens(_scored()) == tokens(_scored())
    assert tokens(_scored()) != tokens(_scored(seed=6))
    assert tokens(_scored()) != tokens(_scored(label="step2"))


def test_a_prompt_twice_in_a_batch_gets_two_groups():
    collector, _ = _collector()
    results = collector.scored(collector.sample([PROMPTS[0], PROMPTS[0]], 2, SAMPLING, "step1"))
    assert len({completion.request_id for _, completion, _ in results}) == 4


def test_an_engine_that_leaves_requests_out_is_refused():
    collector, _ = _collector()
    engine = StubEngine([])
    engine._generate = lambda requests: iter(())  # type: ignore[method-assign]
    collector = Collector(engine, StubScorer([]), StubTokenizer(), seed=1, group=None)
    with pytest.raises(RolloutError, match="gave no answer"):
        collector.sample(PROMPTS, 2, SAMPLING, "step1")


SPECIAL = ("<pad>", "<bos>", "<eos>", "<end>", "<think>", "</think>", "<tool_call>", "0", "1", "!", "<unk>")


def _tokenizer(**named: str) -> PreTrainedTokenizerFast:
    """A real tokenizer of words, all of whose added tokens are special."""
    words = ["so", "it", "is", "\\boxed{", "}", "2"]
    model = WordLevel({word: place for place, word in enumerate([*SPECIAL, *words])}, unk_token="<unk>")
    backend = BackendTokenizer(model)
    backend.pre_tokenizer, backend.decoder = WhitespaceSplit(), Fuse()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **named)


def _text(tokenizer: PreTrainedTokenizerFast, words: str, reason: FinishReason = "stop") -> str:
    ids = tuple(tokenizer.convert_tokens_to_ids(words.split()))
    completion = Completion("", (5,), ids, (-1.0,) * len(ids), reason, (0,) * len(ids))
    return response_text(tokenizer, completion, control_tokens(tokenizer))


@pytest.mark.parametrize(
    ("words", "reason", "text"),
    [
        ("<think> it is 2 </think> \\boxed{ 1 0 } <eos>", "stop", "<think>itis2</think>\\boxed{10}"),
        ("it is 1 0 <end>", "stop", "itis10"),  # another of the model's ends
        ("it is 1 0", "length", "itis10"),
        ("<tool_call> 1", "length", "<tool_call>1"),
        ("<bos> it is <pad> 1 <eos>", "stop", "itis1"),
        ("it is <unk> 1 <eos>", "stop", "itis<unk>1"),
        ("<eos>", "stop", ""),
        ("", "abort", ""),
    ],
)
def test_special_tokens_that_say_something_reach_the_scorer(words, reason, text):
    tokenizer = _tokenizer(bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    assert _text(tokenizer, words, reason) == text


def test_padding_that_is_the_end_or_a_word_or_absent():
    assert _text(_tokenizer(eos_token="<eos>", pad_token="<eos>"), "it is 1 <eos>") == "itis1"
    assert _text(_tokenizer(eos_token="<eos>", pad_token="!"), "it is 1 ! <eos>") == "itis1!"
    assert _text(_tokenizer(eos_token="<eos>", pad_token="0"), "it is 1 0 <eos>") == "itis10"
    assert _text(_tokenizer(), "it is 1 <pad>", "length") == "itis1<pad>"


def _on_rank(rank: int, world_size: int) -> tuple[list, int]:
    collector, scorer = _collector(dist.group.WORLD)
    pending = collector.sample(PROMPTS, 3, SAMPLING, "step1")
    if rank == 1:
        time.sleep(0.2)  # ranks finish at different times
    return collector.scored(pending), len(scorer.items)


def test_two_ranks_share_the_work_and_agree_with_one():
    (first, first_scored), (second, second_scored) = run_ranks(2, _on_rank)
    assert first == second == _scored()
    assert sorted((first_scored, second_scored)) == [7, 8]
