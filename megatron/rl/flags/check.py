"""Holds the flags that were given against the tables: what is refused is refused in one line, before any work."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from megatron.rl.errors import ConfigError
from megatron.rl.flags.conditions import CONDITIONS
from megatron.rl.flags.tables import row_of
from megatron.rl.flags.verdict import Kind, Row


@dataclass(frozen=True)
class GivenFlag:
    """A flag of the command line."""

    word: str  # as it was given
    destination: str
    value: Any
    default: Any  # of Megatron's parser
    row: Row | None  # its verdict; None for a flag that the tables do not know

    @property
    def shown(self) -> str:
        """The flag with its value, where it takes one."""
        value = _plain(self.value)
        if isinstance(value, bool):
            return self.word
        return f"{self.word} {' '.join(map(str, value)) if isinstance(value, list) else value}"


def given_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[GivenFlag]:
    """The flags in ``argv``, in the parser's order. Parses: raises and exits as the parser does."""
    words = {word.split("=", 1)[0] for word in argv if word.startswith("-")}
    values = parser.parse_args(list(argv))
    found = []
    for action in parser._actions:
        for word in words.intersection(action.option_strings):
            value = getattr(values, action.dest)
            found.append(GivenFlag(word, action.dest, value, action.default, row_of(action)))
    return found


def refuse_unsupported(given: Sequence[GivenFlag]) -> None:
    """Raises :class:`ConfigError` for a flag, or a value of one, that this program does not act on."""
    for flag in given:
        row = flag.row
        if row is None:
            raise ConfigError(f"{flag.word}: nothing is known of it here, and it might do nothing; leave it out")
        if row.values is not None:
            if not set(_items(flag.value)) <= set(row.values):
                allowed = " or ".join(map(str, row.values))
                raise ConfigError(f"{flag.shown} cannot be used here, only {allowed}: {row.why}")
        elif row.kind is Kind.REFUSED and not _leaves_it_off(flag):
            raise ConfigError(f"{flag.shown} cannot be used here: {row.why}")


def check_given(given: Sequence[GivenFlag], args: argparse.Namespace, model: Mapping[str, object]) -> None:
    """Holds what was given against the model and against the other flags.

    Args:
        given: the flags of the command line.
        args: the arguments, those that were not given filled in.
        model: by destination, what the Hugging Face checkpoint makes of Megatron's arguments.

    Raises:
        ConfigError: a flag that contradicts the model, or that would do nothing beside the others.
    """
    for flag in given:
        assert flag.row is not None
        if flag.row.kind is Kind.MODEL:
            _check_against_model(flag, model)
        for name in flag.row.needs:
            condition = CONDITIONS[name]
            if not condition.holds(args) and not _leaves_it_off(flag):
                raise ConfigError(f"{flag.shown} has no effect without {condition.words}; leave it out")


def _check_against_model(flag: GivenFlag, model: Mapping[str, object]) -> None:
    if flag.destination not in model:
        if not _leaves_it_off(flag):
            raise ConfigError(f"{flag.shown} has no effect on the model in --hf-model; leave it out")
    elif flag.value != model[flag.destination]:
        there = model[flag.destination]
        raise ConfigError(f"{flag.shown} contradicts the model in --hf-model, which has {there}; leave it out")


def _leaves_it_off(flag: GivenFlag) -> bool:
    """Whether the value switches nothing on that is off by itself."""
    return _is_off(flag.value) and _is_off(flag.default)


def _is_off(value: Any) -> bool:
    return not value or value == "none"


def _items(value: Any) -> list[Any]:
    value = _plain(value)
    return value if isinstance(value, list) else [value]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def with_honest_help(parser: argparse.ArgumentParser) -> None:
    """Makes ``--help`` say of every flag what becomes of it in this program."""
    for action in parser._actions:
        row = row_of(action)
        if row is None or action.help is None:
            continue
        only = "" if row.values is None else f"only {' or '.join(map(str, row.values))}; "
        if row.kind is Kind.REFUSED:
            action.help = f"(not used here: {only}{row.why})"
        elif row.kind is Kind.HOLDS:
            action.help = f"(so without it: {row.why})"
        elif row.kind is Kind.MODEL:
            action.help = f"{action.help} (comes from --hf-model, which it must not contradict)"
