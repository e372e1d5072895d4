"""The records that travel between prompts, rollout engines, rewards and the trainer."""

from dataclasses import dataclass, field
from typing import Literal

from megatron.rl.config import SamplingConfig

FinishReason = Literal["stop", "length", "abort"]
RewardStatus = Literal["ok", "unreadable", "timeout", "error"]


@dataclass(frozen=True)
class Prompt:
    """One problem: what the policy sees and what the reward needs."""

    index: int  # position in its data set, the key of every ledger
    text: str
    token_ids: tuple[int, ...]
    answer: str
    source: str = ""
    metadata: dict = field(default_factory=dict)  # what a scorer needs beyond the answer
    line: int = field(default=0, compare=False)  # where it stands in its file, from 1; for messages


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample. Token ids in; text never reaches an engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingConfig
    seed: int  # decides the response, whichever process or batch it is sampled in


@dataclass(frozen=True)
class Completion:
    """One sampled response, as the engine gives it.

    ``logprobs[i]`` is the natural logarithm of the probability with which ``token_ids[i]`` was sampled:
    at the sampling temperature, after truncation if there was any. It is never NaN or infinite.
    ``versions[i]`` is the policy version that sampled token i. The end-of-sequence token, when
    sampled, is the last token id and carries its own log-probability.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[int, ...]


@dataclass(frozen=True)
class RewardItem:
    """What a reward function is given: the decoded response and the problem it answers."""

    response: str
    prompt: Prompt


@dataclass(frozen=True)
class RewardResult:
    """A score, and whether it is one: a time-out or an error is told apart from a wrong answer.

    An unreadable response has a score, 0: it is a wrong answer, and it is counted.
    """

    score: float
    status: RewardStatus = "ok"
    detail: str = ""  # why there is no score, or what cannot be read

    @property
    def is_scored(self) -> bool:
        """Whether the score says something about the response."""
        return self.status in ("ok", "unreadable")


@dataclass(frozen=True)
class Sample:
    """One response ready for training."""

    prompt: Prompt
    completion: Completion
    reward: RewardResult
    advantage: float
    trained: bool = True  # False: filtered out; it enters neither the loss nor its denominators
