"""Evaluation on held-out problems: mean reward of k samples, and pass@k."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.rl.collector import Collector
from megatron.rl.config import SamplingConfig
from megatron.rl.types import Prompt


@dataclass(frozen=True)
class Evaluation:
    """Scores over ``prompts`` problems with ``samples`` responses each."""

    reward: float  # mean over all responses
    pass_at_k: float  # share of problems with at least one response scored above one half
    prompts: int
    samples: int
    response_length: float  # tokens
    unreadable: int  # responses without a final answer that can be read; they score 0
    timeouts: int
    errors: int


def evaluate(
    collector: Collector, prompts: Sequence[Prompt], samples: int, sampling: SamplingConfig, label: str
) -> Evaluation:
    """Samples every problem ``samples`` times as in training and scores the responses. Collective."""
    results = collector.scored(collector.sample(prompts, samples, sampling, label))
    scores = [result.score for _, _, result in results]
    groups = [scores[i : i + samples] for i in range(0, len(scores), samples)]
    return Evaluation(
        reward=sum(scores) / len(scores),
        pass_at_k=sum(max(group) > 0.5 for group in groups) / len(groups),
        prompts=len(prompts),
        samples=samples,
        response_length=sum(len(completion.token_ids) for _, completion, _ in results) / len(results),
        unreadable=sum(result.status == "unreadable" for _, _, result in results),
        timeouts=sum(result.status == "timeout" for _, _, result in results),
        errors=sum(result.status == "error" for _, _, result in results),
    )
