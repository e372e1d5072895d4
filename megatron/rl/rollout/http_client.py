"""JSON over HTTP to one server, and the background thread in which many such calls are in flight at a time."""

import asyncio
import json
import os
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import httpx2

from megatron.rl.errors import RolloutError

# The one place that a key is read from: a flag would show it in process lists and run folders.
API_KEY_VARIABLE = "ROLLOUT_API_KEY"
_CONNECT_S = 10.0
_EXCERPT = 300
_TOO_MANY_REQUESTS = 429


class ServerFault(Exception):
    """The server failed, not the request: another server, or this one later, may answer. One line."""


class JsonClient:
    """Talks to one server from within an event loop.

    Args:
        url: scheme, host and port, and a path where the routes lie below one.

    Raises:
        RolloutError: ``url`` is none.
    """

    def __init__(self, url: str) -> None:
        parsed = httpx2.URL(url) if url.isprintable() else httpx2.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise RolloutError(f"--rollout-url {url!r}: not a server's address; write it as http://HOST:PORT")
        key = os.environ.get(API_KEY_VARIABLE)
        self.url = url.rstrip("/")
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            # How many requests are in flight is the caller's decision.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # a proxy for the outside world is not for these servers
        )

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The JSON that a route answers; None for an empty answer. Raises as :meth:`post` does."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any] | None, *, timeout_s: float) -> Any:
        """Sends a JSON body and gives the JSON of the answer; None for an empty one.

        Args:
            timeout_s: seconds until the whole answer must be there.

        Raises:
            ServerFault: no connection, no answer in time, an answer cut off or not JSON, status 5xx or 429.
            RolloutError: any other status: the server understood and refused.
        """
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        where = f"server {self.url}, {method} {path.partition('?')[0]}"
        timeout = httpx2.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s))
        try:
            # httpx's own limits are for each read and write; a server that sends a byte now and then escapes them.
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, json=body, timeout=timeout)
        except (TimeoutError, httpx2.TimeoutException):
            raise ServerFault(f"{where}: no answer within {timeout_s:g} s") from None
        except httpx2.TransportError as error:
            raise ServerFault(f"{where}: {_one_line(str(error)) or type(error).__name__}") from None
        if response.status_code == _TOO_MANY_REQUESTS or response.is_server_error:
            raise ServerFault(f"{where}: status {response.status_code} ({_one_line(response.text)})")
        if not response.is_success:
            raise RolloutError(f"{where}: refused with status {response.status_code} ({_one_line(response.text)})")
        if not response.content:
            return None
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ServerFault(f"{where}: the answer is not JSON ({_one_line(response.text)})") from None

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


class EventLoopThread:
    """An event loop in a thread of its own, so that calls proceed while the trainer scores and trains."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, waited for."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt in this thread must not leave the call running
            future.cancel()
            raise

    def stream[T](self, items: AsyncIterator[T]) -> Iterator[T]:
        """What the asynchronous iterator yields, as it comes. It starts at once and is ended when this one is."""
        results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for item in items:
                    results.put((True, item))
                results.put((False, None))
            except BaseException as error:
                results.put((False, error))
                raise

        return self._drained(asyncio.run_coroutine_threadsafe(pump(), self._loop), results)

    @staticmethod
    def _drained(future: Any, results: "queue.SimpleQueue[tuple[bool, Any]]") -> Iterator[Any]:
        try:
            while True:
                is_item, value = results.get()
                if is_item:
                    yield value
                elif value is None:
                    return
                else:
                    raise value
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancels what is still running and ends the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[:_EXCERPT] + "..."
