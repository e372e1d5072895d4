"""What an engine for servers has to know of one kind of server: its routes, and how its answers read."""

import abc
import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.http_client import JsonClient
from megatron.rl.types import FinishReason, GenerationRequest

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

    max_length: int  # longest prompt plus response in tokens


@dataclass(frozen=True)
class ServerAnswer:
    """A response as the server gave it, in one form for all kinds; nothing is checked yet but the types.

    ``spans`` are (weight version, first token, past the last token).
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    spans: tuple[tuple[str, int, int], ...]


class ServerApi(abc.ABC):
    """Routes of one kind of server. Stateless; every call is given the server to talk to.

    The calls raise :class:`ServerFault` and :class:`RolloutError` as :class:`JsonClient` does.
    """

    name: str
    health_path: str

    @abc.abstractmethod
    async def describe(self, client: JsonClient, timeout_s: float) -> ServerFacts:
        """What the server tells of itself.

        Raises:
            RolloutError: it cannot serve as a rollout engine; names the setting to change.
        """

    @abc.abstractmethod
    async def generate(
        self, client: JsonClient, request: GenerationRequest, eos_token_ids: Collection[int], timeout_s: float
    ) -> ServerAnswer:
        """Samples one response, which ends at any of ``eos_token_ids``.

        Raises:
            RolloutError: the answer lacks what an answer must have, or says that a log-probability is not finite;
                names the request.
        """

    @abc.abstractmethod
    async def set_version(self, client: JsonClient, version: int, timeout_s: float) -> None:
        """From now on sampled tokens carry this version."""

    @abc.abstractmethod
    async def load_folder(self, client: JsonClient, folder: Path, version: int, timeout_s: float) -> None:
        """Takes over the weights in a folder, with nothing sampled meanwhile and nothing kept of the old ones' cache.

        Requests in flight go on under the new weights. After any error the server must be taken to hold a mixture;
        it stays paused then.
        """


class Reader:
    """Reads a JSON answer and says what is wrong with it.

    Args:
        where: what the answer belongs to, for messages.
    """

    def __init__(self, where: str, answer: Any) -> None:
        self._where = where
        self._answer = answer

    def value(self, *path: str | int) -> Any:
        """What lies at a path of keys and indices; None where it is null."""
        value = self._answer
        for depth, key in enumerate(path):
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                raise self._fault(path[: depth + 1], "is missing") from None
        return value

    def integers(self, *path: str | int) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.value(*path)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._fault(path, "is no list of whole numbers")
        return tuple(value)

    def finish_reason(self, *path: str | int) -> FinishReason:
        """One of the three that the contract has."""
        value = self.value(*path)
        if value not in FINISH_REASONS:
            raise self._fault(path, f"is {value!r}, not one of {', '.join(FINISH_REASONS)}")
        return FINISH_REASONS[value]

    def spans(self, *path: str | int) -> tuple[tuple[str, int, int], ...]:
        """A list of {"version", "start", "end"}."""
        value = self.value(*path)
        try:
            return tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in value)
        except (KeyError, TypeError, ValueError):
            raise self._fault(path, "is no list of weight versions with start and end") from None

    def _fault(self, path: tuple[str | int, ...], what: str) -> RolloutError:
        return RolloutError(f"{self._where}: {'.'.join(map(str, path))} {what} in the server's answer")


def logprob_of(where: str, position: int, value: Any) -> float:
    """A log-probability as the server sent it. JSON has no NaN and no infinity, so null stands for both.

    Raises:
        RolloutError: it is no number; nothing may stand in for it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RolloutError(
            f"{where}: position {position} has log-probability {value!r}, where the server must give a finite number"
        )
    return float(value)


def folded_seed(seed: int) -> int:
    """A seed of 31 bits that depends on all bits of ``seed``: servers drop the upper ones, or refuse them."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little", signed=True), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
