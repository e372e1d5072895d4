"""Errors in words.

A :class:`UserError` is a mistake that the person at the keyboard can mend: the entry point prints its
message as one line and exits with status 2. Everything else is a bug and ends in a stack trace.
"""


class UserError(Exception):
    """A user's mistake. The message says in one line what is wrong, where, and how to mend it."""


class ConfigError(UserError):
    """A flag, or a combination of flags, that cannot be run."""


class DataError(UserError):
    """A prompt file that is missing, malformed, or does not fit the limits."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete, or does not fit the model."""


class RewardError(UserError):
    """A reward function that cannot be loaded or used as asked."""


class RolloutError(UserError):
    """A rollout engine that is unreachable, misconfigured, or answers what it must not."""


class OutputError(UserError):
    """A run folder that cannot be written, or that does not hold what is read from it."""
