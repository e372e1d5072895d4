"""All tables together, in the order of the page."""

import argparse

from megatron.rl.flags import loop, machine, model, optimization
from megatron.rl.flags.verdict import Row, by_flag

THEMES = (
    *(loop.LOOP, loop.OBJECTIVE, loop.EVALUATION, loop.DATA),
    *model.THEMES,
    *optimization.THEMES,
    *machine.THEMES,
    loop.OTHER_PROGRAMS,
)
TABLE = by_flag(THEMES)


def row_of(action: argparse.Action) -> Row | None:
    """The verdict on a flag of the parser, None where the tables do not know it."""
    return next((TABLE[name] for name in action.option_strings if name in TABLE), None)
