import pytest

from megatron.rl.rewards.units import canonical_unit, same_unit


@pytest.mark.parametrize(
    ("written", "unit"),
    [
        ("cm", "cm"),
        ("Centimetres", "cm"),
        ("square inches", "in 2"),
        ("in^2", "in 2"),
        ("cubic feet", "ft 3"),
        ("meters squared", "m 2"),
        ("m/s", "m / s"),
        ("meters per second", "m / s"),
        ("miles per hour", "mph"),
        ("km/h", "kmh"),
        ("dollars", "$"),
        (r"\$", "$"),
        ("p.m.", "pm"),
        ("apples", ""),
        ("cm of rope", ""),
        ("", ""),
        ("2", ""),
    ],
)
def test_one_name_for_a_unit(written, unit):
    assert canonical_unit(written) == unit


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("", "cm", True), ("cm", "", True), ("cm", "cm", True), ("cm", "m", False), ("deg", "degc", True)]
    + [("degf", "deg", True), ("degc", "degf", False)],
)
def test_an_unknown_unit_can_be_any(one, other, same):
    assert same_unit(one, other) is same
