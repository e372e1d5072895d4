"""What all kinds of servers share: reading answers, and seeds."""

import pytest

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.server_api import Reader, folded_seed


def test_seeds_depend_on_all_bits_and_fit_31():
    seeds = [0, 1, 2, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -1]
    folded = [folded_seed(seed) for seed in seeds]
    assert len(set(folded)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in folded)
    assert folded == [folded_seed(seed) for seed in seeds]


@pytest.mark.parametrize("answer", [None, [], {}, "text", 7, {"a": None}, {"a": {"b": {}}}])
def test_what_is_missing_is_named_whatever_the_answer_is(answer):
    with pytest.raises(RolloutError, match=r"request r0: a(\.b)?(\.0)? is missing in the server's answer"):
        Reader("request r0", answer).value("a", "b", 0)


@pytest.mark.parametrize("value", [None, {}, "12", [1.0], [True], ["1"], [None], 5])
def test_only_a_list_of_whole_numbers_is_one(value):
    with pytest.raises(RolloutError, match="a is no list of whole numbers"):
        Reader("x", {"a": value}).integers("a")


@pytest.mark.parametrize("value", [None, 5, [1], [{}], [{"version": 1, "start": "x", "end": 2}], [{"version": 1}]])
def test_only_spans_are_spans(value):
    with pytest.raises(RolloutError, match="a is no list of weight versions"):
        Reader("x", {"a": value}).spans("a")
