"""Samples for the tests of this folder."""

from megatron.rl.types import Completion, Prompt, RewardResult, Sample


def make_sample(
    prompt: int = 3,
    response: int = 4,
    *,
    advantage: float = 1.0,
    first_id: int = 100,
    name: str = "request",
) -> Sample:
    """A sample whose tokens count up from ``first_id`` and whose i-th log-probability is -(i + 1) / 8, exactly."""
    ids = tuple(range(first_id, first_id + prompt + response))
    completion = Completion(
        request_id=name,
        prompt_ids=ids[:prompt],
        token_ids=ids[prompt:],
        logprobs=tuple(-(i + 1) / 8 for i in range(response)),
        finish_reason="stop",
        versions=(0,) * response,
    )
    return Sample(Prompt(0, "", ids[:prompt], "1"), completion, RewardResult(1.0), advantage)
