"""The tables know every flag of the parser and no other, and their page is up to date."""

from pathlib import Path

import pytest

from megatron.rl.flags import TABLE, THEMES, Kind, flags_page, row_of
from megatron.rl.flags.conditions import CONDITIONS
from megatron.rl.flags.verdict import Theme, acts, by_flag, refused
from tests.unit_tests.rl.flags.parser import flags_of, whole_parser

PAGE = Path(__file__).parents[4] / "docs" / "flags.md"


@pytest.fixture(scope="module")
def parser():
    return whole_parser()


def test_every_flag_of_the_parser_has_a_verdict(parser):
    unknown = [action.option_strings[0] for action in flags_of(parser) if row_of(action) is None]
    assert not unknown, "decide what becomes of them, in a table of megatron/rl/flags"


def test_every_verdict_is_on_a_flag_of_the_parser(parser):
    names = {name for action in flags_of(parser) for name in action.option_strings}
    assert TABLE.keys() <= names, "the parser has them no longer: take them out of the tables"


def test_no_flag_has_two_verdicts(parser):
    for action in flags_of(parser):
        assert len([name for name in action.option_strings if name in TABLE]) == 1, action.option_strings
    with pytest.raises(ValueError, match="--a has two verdicts"):
        by_flag([Theme("one", (acts("--a --b"), refused("--a", "why")))])


def test_every_refusal_says_why_and_every_condition_exists():
    for theme in THEMES:
        for row in theme.rows:
            assert row.kind in (Kind.ACTS, Kind.MODEL) or row.why, row
            assert set(row.needs) <= CONDITIONS.keys(), row
    named = {name for row in TABLE.values() for name in row.needs}
    assert named == CONDITIONS.keys()


def test_what_the_model_decides_is_what_hugging_face_gives(parser):
    from megatron.rl.arguments import read_hf_config
    from megatron.rl.assets import bundled_model_dir
    from megatron.rl.weights import megatron_arguments_from_hf

    given = megatron_arguments_from_hf(read_hf_config(str(bundled_model_dir()))).keys()
    from_model = {action.dest for action in flags_of(parser) if row_of(action).kind is Kind.MODEL}
    assert from_model - given == {"rope_scaling_factor"}, "only Llama 3's scaling has one"
    # The rest of what it gives does not make another model, and may be chosen.
    others = {"moe_router_dtype", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_expert_capacity_factor"}
    assert given - from_model == others


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == flags_page(), "docs/flags.md is stale: run tools/write_flags_page.py"


def test_the_page_names_every_flag():
    page = flags_page()
    assert all(f"`{flag}`" in page for flag in TABLE)
