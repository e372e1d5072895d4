"""What becomes of every flag of the command line: tables of verdicts, the checks that go by them, and their page."""

from megatron.rl.flags.check import GivenFlag, check_given, given_flags, refuse_unsupported, with_honest_help
from megatron.rl.flags.page import flags_page
from megatron.rl.flags.tables import TABLE, THEMES, row_of
from megatron.rl.flags.verdict import Kind, Row

__all__ = [
    "TABLE",
    "THEMES",
    "GivenFlag",
    "Kind",
    "Row",
    "check_given",
    "flags_page",
    "given_flags",
    "refuse_unsupported",
    "row_of",
    "with_honest_help",
]
