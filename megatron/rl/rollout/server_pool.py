"""Several servers that hold one policy: spreads calls over them, and makes a call elsewhere where one failed."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.http_client import JsonClient, ServerFault

# Of one call to one server while weights are updated: a connection that the server just closed must not cost it its
# place, and a server that is down must not hold up the others.
_CONTROL_ATTEMPTS = 3


@dataclass(frozen=True)
class HttpLimits:
    """How much is asked of servers at a time, and for how long they are believed."""

    max_in_flight: int = 256  # requests of this process
    request_timeout_s: float = 3600.0  # a whole response, from its request on
    control_timeout_s: float = 600.0  # each step of a weight update
    attempts: int = 5  # tries of one request, over all servers
    backoff_s: float = 0.5  # a server rests so long after a fault, doubled with each further one in a row ...
    max_backoff_s: float = 30.0  # ... up to this
    probe_interval_s: float = 10.0  # between probes of a server that has requests in flight, and for each probe
    probes: int = 3  # a server that leaves so many in a row unanswered hangs


class StaleWeights(ServerFault):
    """The server answered with weights that are not the policy's: it was started anew, or missed an update."""


class _Server:
    """What the pool knows of one server."""

    def __init__(self, client: JsonClient) -> None:
        self.client = client
        self.calls: set[asyncio.Task] = set()
        self.watcher: asyncio.Task | None = None  # while there are calls
        self.refused: str | None = None  # why it gets no requests until its weights have been updated
        self._faults = 0  # in a row
        self._rests_until = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds until it may be asked again."""
        return max(0.0, self._rests_until - time.monotonic())

    def note_success(self) -> None:
        self._faults = 0

    def note_fault(self, limits: HttpLimits) -> None:
        """All calls in flight fail when a server goes down; they are one fault."""
        if not self.rest_s:
            self._rests_until = time.monotonic() + min(limits.backoff_s * 2**self._faults, limits.max_backoff_s)
            self._faults += 1

    def give_up_calls(self) -> None:
        """Ends all calls in flight; each is made elsewhere."""
        for call in self.calls:
            call.cancel()


class ServerPool:
    """Used from within one event loop.

    Args:
        clients: one for each server; more than one address may lead to the same router.
        limits: see :class:`HttpLimits`.
        health_path: a route that answers at once while a server is alive.
    """

    def __init__(self, clients: Sequence[JsonClient], limits: HttpLimits, *, health_path: str) -> None:
        self._servers = [_Server(client) for client in clients]
        self._limits = limits
        self._health_path = health_path

    async def ask[T](self, what: str, call: Callable[[JsonClient], Coroutine[Any, Any, T]]) -> T:
        """The result of a call that any server may answer, and that may be made again.

        Args:
            what: names the call in errors.

        Raises:
            RolloutError: no server is left, or none answered in :attr:`HttpLimits.attempts` tries; whatever ``call``
                raises but :class:`ServerFault`.
        """
        last: ServerFault | None = None
        for _ in range(self._limits.attempts):
            server = await self._pick(what)
            try:
                result = await self._call(server, call)
            except StaleWeights as fault:
                server.refused = str(fault)
                last = fault
            except ServerFault as fault:
                server.note_fault(self._limits)
                last = fault
            else:
                server.note_success()
                return result
        raise RolloutError(f"{what}: failed {self._limits.attempts} times; the last time: {last}")

    def __len__(self) -> int:
        return len(self._servers)

    async def tell_each(self, call: Callable[[JsonClient], Coroutine[Any, Any, object]]) -> dict[str, str]:
        """Makes a call to every server at once, refused ones too, again after a fault. It must bear repetition.

        Returns:
            {address: what went wrong the last time}, of the servers where it never succeeded.
        """
        results = await asyncio.gather(*(self._tell(server.client, call) for server in self._servers))
        return {
            server.client.url: result
            for server, result in zip(self._servers, results, strict=True)
            if result is not None
        }

    async def _tell(self, client: JsonClient, call: Callable[[JsonClient], Coroutine[Any, Any, object]]) -> str | None:
        for attempt in range(_CONTROL_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._limits.backoff_s * 2 ** (attempt - 1))
            try:
                await call(client)
                return None
            except ServerFault as fault:
                problem = str(fault)
            except RolloutError as error:  # repeating what was refused is no use
                return str(error)
        return problem

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Servers at these addresses get no request until the next call of this, all others do.

        What is in flight at a server that is refused is asked of another one.
        """
        for server in self._servers:
            server.refused = reasons.get(server.client.url)
            if server.refused is not None:
                server.give_up_calls()

    async def close(self) -> None:
        """Closes all connections."""
        for server in self._servers:
            await server.client.close()

    async def _pick(self, what: str) -> _Server:
        """The server with the fewest calls of those that do not rest; waits where all do."""
        while True:
            usable = [server for server in self._servers if server.refused is None]
            if not usable:
                reasons = "; ".join(f"{server.client.url}: {server.refused}" for server in self._servers)
                raise RolloutError(f"{what}: no server holds the policy's weights ({reasons})")
            awake = [server for server in usable if not server.rest_s]
            if awake:
                return min(awake, key=lambda server: len(server.calls))
            await asyncio.sleep(min(server.rest_s for server in usable))

    async def _call[T](self, server: _Server, call: Callable[[JsonClient], Coroutine[Any, Any, T]]) -> T:
        task = asyncio.create_task(call(server.client))
        server.calls.add(task)
        if server.watcher is None:
            server.watcher = asyncio.create_task(self._watch(server))
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():  # the caller wants no answer any more
                raise
            raise ServerFault(f"server {server.client.url}: hangs, or failed a weight update") from None
        finally:
            server.calls.discard(task)
            if not server.calls and server.watcher is not None:
                server.watcher.cancel()
                server.watcher = None

    async def _watch(self, server: _Server) -> None:
        """A response may rightly take an hour, so a server that hangs is found by its health route."""
        unanswered = 0
        while True:
            await asyncio.sleep(self._limits.probe_interval_s)
            try:
                await server.client.get(self._health_path, timeout_s=self._limits.probe_interval_s)
                unanswered = 0
            except (ServerFault, RolloutError):
                unanswered += 1
            if unanswered == self._limits.probes:
                server.give_up_calls()
                unanswered = 0
