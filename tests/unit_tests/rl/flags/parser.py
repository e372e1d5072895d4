"""The parser as the program has it."""

import argparse

from megatron.rl import cpu_platform
from megatron.rl.argument_group import add_rl_arguments

cpu_platform.install()


def whole_parser() -> argparse.ArgumentParser:
    """Megatron's, with this program's own group; mistakes raise ``argparse.ArgumentError``."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    return add_rl_arguments(add_megatron_arguments(parser))


def flags_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All but ``--help``."""
    return [action for action in parser._actions if action.dest != "help"]
