"""Scoring in worker processes with a hard deadline for each response."""

import json
import queue
import threading
from collections.abc import Hashable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from megatron.rl.errors import RewardError
from megatron.rl.rewards.scorer import Scorer
from megatron.rl.rewards.worker_process import WorkerDied, WorkerDiedStarting, WorkerProcess, WorkerTimeout
from megatron.rl.types import Prompt, RewardItem, RewardResult

_ATTEMPTS = 2


@dataclass(frozen=True)
class _Job:
    request: dict[str, Any]
    future: Future[RewardResult]


class WorkerPool(Scorer):
    """Scores by a function named ``MODULE:FUNCTION`` in ``workers`` processes, one thread here for each.

    The function gets ``{"response", "answer", "source", "metadata"}`` and returns the score. For each response:

    * the function raises :class:`~megatron.rl.rewards.protocol.UnreadableResponse`: score 0, status ``unreadable``;
    * no score within ``timeout_s``: status ``timeout``, and the process is killed and replaced;
    * the function raises, or its score is not finite: status ``error``;
    * the process dies: it is replaced and the response scored once more, since the cause can lie outside of it
      (a machine out of memory); a second death is status ``error``, or a
      :class:`~megatron.rl.errors.RewardError` where the process does not even start.

    No response's fate touches another's.

    Args:
        spec: the function.
        workers: processes.
        timeout_s: deadline of each response, in seconds.
        right_response: how a response gives an answer, with ``{}`` for it.
        by_answer: the function looks at a problem's answer alone, not at its source and metadata.
    """

    def __init__(
        self, spec: str, *, workers: int, timeout_s: float, right_response: str = "{}", by_answer: bool = True
    ) -> None:
        self._right_response = right_response
        self._by_answer = by_answer
        self._spec = spec
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards _closed, and _workers against replacement while closing
        self._closed = False
        self._workers = [WorkerProcess(spec, timeout_s) for _ in range(workers)]
        # Daemons: an interpreter that ends without close() takes the pipes with it, and so the workers.
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids at this moment."""
        return [worker.pid for worker in self._workers]

    def right_response(self, answer: str) -> str:
        """As the reward's function reads it."""
        return self._right_response.format(answer)

    def key(self, prompt: Prompt) -> Hashable:
        """The answer, with source and metadata where the function looks at them."""
        if self._by_answer:
            return prompt.answer
        return prompt.answer, prompt.source, json.dumps(prompt.metadata, sort_keys=True)

    def submit(self, item: RewardItem) -> Future[RewardResult]:
        """Queues one response. Raises RuntimeError once closed."""
        prompt = item.prompt
        request = {
            "response": item.response,
            "answer": prompt.answer,
            "source": prompt.source,
            "metadata": prompt.metadata,
        }
        job = _Job(request, Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("the scorer is closed")
            self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """Ends threads and processes; what is not scored yet is cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._cancel_queued()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.dispose()

    def _cancel_queued(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job.future.cancel()

    def _serve(self, place: int) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                job.future.set_result(self._score(place, job.request))
            except BaseException as error:  # goes on to whoever waits for the future
                job.future.set_exception(CancelledError() if self._closed else error)

    def _score(self, place: int, request: dict[str, Any]) -> RewardResult:
        death: WorkerDied | None = None
        for _ in range(_ATTEMPTS):
            try:
                return RewardResult(**self._workers[place].ask(request))
            except WorkerTimeout:
                self._replace(place)
                return RewardResult(0.0, "timeout", f"no score within {self._timeout_s:g} s")
            except WorkerDied as error:
                self._replace(place)
                death = error
        if isinstance(death, WorkerDiedStarting):
            raise RewardError(f"the scoring process of {self._spec} does not start: {death}")
        return RewardResult(0.0, "error", f"the scoring process died {_ATTEMPTS} times: {death}")

    def _replace(self, place: int) -> None:
        with self._lock:
            if self._closed:
                raise CancelledError
            self._workers[place].dispose()
            self._workers[place] = WorkerProcess(self._spec, self._timeout_s)
