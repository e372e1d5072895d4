"""A seeded cursor over the prompts that continues at the exact next prompt after a resume."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from megatron.rl.errors import DataError
from megatron.rl.types import Prompt


class PromptSampler:
    """Gives out all prompts in a new random order each epoch, for ever.

    The order depends on the seed and the number of prompts alone: not on batch sizes, ranks or restarts.
    A batch may reach over the end of an epoch, and then can hold the same prompt twice.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("there is no prompt to sample from")
        self._prompts = prompts
        self._digest = _digest(prompts)
        self._seed = seed
        self._position = 0  # prompts given out so far, over all epochs
        self._epoch = -1  # whose order is in self._order
        self._order: list[int] = []

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        return self._position // len(self._prompts)

    def next_batch(self, size: int) -> list[Prompt]:
        """The next ``size`` prompts."""
        batch = []
        for position in range(self._position, self._position + size):
            epoch, place = divmod(position, len(self._prompts))
            if epoch != self._epoch:
                self._epoch, self._order = epoch, _shuffled(len(self._prompts), self._seed, epoch)
            batch.append(self._prompts[self._order[place]])
        self._position += size
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the cursor is, in values that JSON keeps."""
        return {"position": self._position, "seed": self._seed, "digest": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the saved place, in the saved seed's order.

        Raises :class:`DataError` where the prompts are not those of the saved run.
        """
        if state["digest"] != self._digest:
            raise DataError(
                "the prompts are not those that the saved run was trained on, so it cannot go on at its next prompt; "
                "give the same prompt file and limits"
            )
        self._position = state["position"]
        self._seed = state["seed"]
        self._epoch = -1


def _shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """A random order of range(count). Sorting by random() is kept the same by every Python; shuffle() need not be."""
    generator = random.Random(f"{seed}/{epoch}")
    keys = [generator.random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        # ascii() keeps the borders between the fields and writes text that UTF-8 cannot encode.
        digest.update(ascii((prompt.index, prompt.text, prompt.answer)).encode("ascii"))
    return digest.hexdigest()
