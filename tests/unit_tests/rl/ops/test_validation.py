"""Refusals name the rule, the first token, and how many there are."""

import pytest
import torch

from megatron.rl.ops.validation import TokenError, check_tokens, inverse_temperature


def test_good_tokens_pass():
    check_tokens({"rule": (torch.tensor([False, False]), torch.tensor([1.0, 2.0]))}, slice(0, 2))


def test_no_tokens_pass():
    check_tokens({"rule": (torch.zeros(0, dtype=torch.bool), torch.zeros(0))}, torch.zeros(0, dtype=torch.long))


def test_first_broken_rule_is_named_with_the_token_among_all_tokens():
    problems = {
        "a rule": (torch.tensor([False, False, False]), torch.zeros(3)),
        "another rule": (torch.tensor([False, True, True]), torch.tensor([1.0, 2.0, 3.0])),
    }
    with pytest.raises(TokenError) as refusal:
        check_tokens(problems, torch.tensor([4, 10, 12]))
    assert str(refusal.value) == "another rule; not so at token 10, and 1 more (got 2.0)"
    assert refusal.value.token == 10


@pytest.mark.parametrize("temperature", [0.5, torch.tensor(0.5), torch.full((3,), 0.5)])
def test_inverse_temperature_is_one_value_per_token(temperature):
    inverse = inverse_temperature(temperature, 3, torch.device("cpu"))
    assert inverse is not None and inverse.tolist() == [2, 2, 2]


def test_temperature_of_one_costs_nothing():
    assert inverse_temperature(1.0, 3, torch.device("cpu")) is None
