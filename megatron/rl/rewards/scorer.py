"""What every reward offers, and the one that needs no worker."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Self

from megatron.rl.types import Prompt, RewardItem, RewardResult


class Scorer(ABC):
    """Scores responses as they come in. Usable from any thread; close it, or use it as a context manager."""

    @abstractmethod
    def submit(self, item: RewardItem) -> Future[RewardResult]:
        """Starts scoring one response and returns at once.

        The future gives a result whatever the response does; it raises
        :class:`~megatron.rl.errors.RewardError` only where the reward cannot be used at all.
        """

    def right_response(self, answer: str) -> str:
        """A response that gives ``answer`` in the form that the reward asks for."""
        return answer

    def key(self, prompt: Prompt) -> Hashable:
        """Equal for problems whose responses the reward scores alike."""
        return prompt.answer

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """The results of ``items``, in their order."""
        return [future.result() for future in [self.submit(item) for item in items]]

    def close(self) -> None:
        """Ends the workers, if any. Futures that are not done yet are cancelled."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ExactScorer(Scorer):
    """1 where response and answer are the same text but for white space at their ends, else 0."""

    def submit(self, item: RewardItem) -> Future[RewardResult]:
        """Compares in this process; the future is done."""
        future: Future[RewardResult] = Future()
        future.set_result(RewardResult(float(item.response.strip() == item.prompt.answer.strip())))
        return future
