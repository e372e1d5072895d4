"""From prompts to scored samples: generation shared over all ranks, scored while it still runs."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from megatron.rl.config import SamplingConfig
from megatron.rl.rewards import Scorer
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.work_sharing import gather_in_order, make_requests, share_of
from megatron.rl.types import Completion, GenerationRequest, Prompt, RewardItem, RewardResult

# What marks the ends and gaps of a text. Every other special token is part of it: <think>, <tool_call>, digits.
_CONTROL = ("bos_token", "eos_token", "pad_token", "sep_token", "cls_token", "mask_token")

Scored = tuple[Prompt, Completion, RewardResult]


@dataclass(frozen=True)
class Pending:
    """Responses of this rank whose scores may still be on their way."""

    prompts: list[Prompt]  # one for each request of all ranks
    requests: list[GenerationRequest]
    mine: list[tuple[Completion, Future[RewardResult]]]


class Collector:
    """Makes rollouts: every rank generates and scores its share and gets all results back.

    Args:
        engine: samples this rank's requests.
        scorer: scores this rank's responses, from the first one that is finished.
        tokenizer: a ``transformers`` tokenizer; decodes responses for the scorer.
        seed: with an occasion's label it decides every response.
        group: the ranks that share the work; None for one.
    """

    def __init__(
        self, engine: RolloutEngine, scorer: Scorer, tokenizer: Any, *, seed: int, group: ProcessGroup | None
    ) -> None:
        self._engine = engine
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._control = control_tokens(tokenizer)
        self._seed = seed
        self._group = group

    def sample(self, prompts: Sequence[Prompt], group_size: int, sampling: SamplingConfig, label: str) -> Pending:
        """Samples this rank's share of ``group_size`` responses to each prompt. ``label`` names the occasion."""
        requests = make_requests(prompts, group_size, sampling, self._seed, label)
        owners = [prompt for prompt in prompts for _ in range(group_size)]
        prompt_of = {request.request_id: prompt for request, prompt in zip(requests, owners, strict=True)}
        rank, ranks = (self._group.rank(), self._group.size()) if self._group is not None else (0, 1)
        mine = []
        for completion in self._engine.generate(share_of(requests, rank, ranks)):
            text = response_text(self._tokenizer, completion, self._control)
            mine.append((completion, self._scorer.submit(RewardItem(text, prompt_of[completion.request_id]))))
        return Pending(owners, requests, mine)

    def scored(self, pending: Pending) -> list[Scored]:
        """All ranks' responses with their scores, in the prompts' order; equal on all ranks. Collective."""
        results = {completion.request_id: (completion, future.result()) for completion, future in pending.mine}
        everything = gather_in_order(results, pending.requests, self._group)
        return [(prompt, *result) for prompt, result in zip(pending.prompts, everything, strict=True)]


def control_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids of a tokenizer's tokens that say nothing.

    They look it, ``<pad>`` or ``[SEP]``; a word or an "!" that a model only borrows for padding does say something.
    """
    named = tokenizer.special_tokens_map
    texts = {named[name] for name in _CONTROL if name in named and named[name].startswith(("<", "["))}
    return frozenset(tokenizer.convert_tokens_to_ids(text) for text in sorted(texts))


def response_text(tokenizer: Any, completion: Completion, control: frozenset[int]) -> str:
    """What a response says, for the scorer: with its special tokens, without its end and without ``control`` tokens."""
    ended = completion.finish_reason == "stop"  # by its last token, whichever of a model's end tokens that is
    token_ids = completion.token_ids[:-1] if ended else completion.token_ids
    return tokenizer.decode([token for token in token_ids if token not in control], skip_special_tokens=False)
