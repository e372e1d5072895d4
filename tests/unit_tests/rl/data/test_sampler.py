import json

import pytest

from megatron.rl.data import PromptSampler
from megatron.rl.errors import DataError
from megatron.rl.types import Prompt

COUNT = 7


def prompts(count: int = COUNT, answer: str = "1") -> list[Prompt]:
    return [Prompt(10 * i, f"prompt {i}", (i,), answer) for i in range(count)]


def take(sampler: PromptSampler, *sizes: int) -> list[int]:
    return [prompt.index for size in sizes for prompt in sampler.next_batch(size)]


def test_every_epoch_holds_every_prompt_once_in_an_order_of_its_own():
    order = take(PromptSampler(prompts(), seed=1), 3 * COUNT)
    epochs = [order[start : start + COUNT] for start in range(0, 3 * COUNT, COUNT)]
    assert all(sorted(epoch) == [10 * i for i in range(COUNT)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_order_does_not_depend_on_batch_sizes():
    whole = take(PromptSampler(prompts(), seed=5), 40)
    assert take(PromptSampler(prompts(), seed=5), 1, 2, 3, 20, 0, 14) == whole


def test_order_depends_on_the_seed():
    assert take(PromptSampler(prompts(), seed=5), COUNT) != take(PromptSampler(prompts(), seed=6), COUNT)


def test_order_is_the_same_for_ever():
    """A saved run must go on after an upgrade: these numbers may not change."""
    first, second = [20, 50, 0, 60, 30, 40, 10], [10, 60, 40, 20, 30, 0, 50]
    assert take(PromptSampler(prompts(), seed=42), 2 * COUNT) == first + second


@pytest.mark.parametrize("taken", range(3 * COUNT + 1))
def test_resume_continues_at_the_exact_next_prompt(taken):
    """verl #7401: a resume at an epoch's edge did no steps. Here every place is resumed at, edges included."""
    whole = take(PromptSampler(prompts(), seed=3), 4 * COUNT)
    stopped = PromptSampler(prompts(), seed=3)
    take(stopped, taken)
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = PromptSampler(prompts(), seed=99)
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert resumed.epoch == taken // COUNT
    assert take(resumed, 4 * COUNT - taken) == whole[taken:]


@pytest.mark.parametrize("others", [prompts(COUNT + 1), prompts(answer="2"), list(reversed(prompts()))])
def test_resume_with_other_prompts_is_refused(others):
    state = PromptSampler(prompts(), seed=3).state_dict()
    with pytest.raises(DataError, match="not those that the saved run"):
        PromptSampler(others, seed=3).load_state_dict(state)


def test_a_single_prompt_and_no_prompt():
    assert take(PromptSampler(prompts(1), seed=0), 3) == [0, 0, 0]
    with pytest.raises(DataError, match="no prompt"):
        PromptSampler([], seed=0)


def test_a_prompt_with_half_a_surrogate_pair_has_a_digest():
    assert PromptSampler([Prompt(0, "\ud800", (1,), "1")], seed=0).state_dict()["digest"]
