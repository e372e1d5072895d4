"""The engine whose policy lives in inference servers."""

import asyncio
import logging
import os
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.http_client import EventLoopThread, JsonClient, ServerFault
from megatron.rl.rollout.server_api import ServerAnswer, ServerApi
from megatron.rl.rollout.server_pool import HttpLimits, ServerPool, StaleWeights
from megatron.rl.rollout.servers import ServerProcess
from megatron.rl.types import Completion, GenerationRequest

_log = logging.getLogger(__name__)
# Of the folder that an update is handed over in; the process id and the version follow.
_FOLDER_PREFIX = f"weights-{socket.gethostname()}-"
SaveTensors = Callable[[Path, Iterator[tuple[str, torch.Tensor]]], None]


class HttpEngine(RolloutEngine):
    """Samples at one or several servers that hold the same policy. Constructor and update are collective.

    Every rank asks the servers for its own share of the requests. Rank 0 of ``group`` alone changes them: it sets
    versions and hands over weights, by files in a folder that the servers see too.

    Responses of a request depend on its seed as far as the server's sampling does; batching changes rounding, so
    they are not the same from run to run.

    Args:
        urls: of the servers.
        api: how this kind of server is spoken to.
        vocab_size: token ids are below it.
        max_length: longest prompt plus response that the model can take; the servers' own limits count too.
        eos_token_ids: each ends a response and is its last token.
        tensor_names: of all tensors of the model; an update must bring exactly these.
        save_tensors: writes a stream of tensors as a checkpoint folder, on rank 0; collective, and raises on all ranks.
        sync_dir: where these folders are made, for as long as an update takes; every server must see it under this
            path. Shared memory where all are on one machine.
        processes: servers that were started for this engine, on rank 0: it ends them, and tells how they died.
        group: the ranks that share the servers; None is torch's default group, or this process alone where
            torch.distributed is not in use.
        limits: see :class:`HttpLimits`.
        version: policy version of the servers' weights now.

    Raises:
        RolloutError: a server cannot be reached or cannot serve as an engine.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api: ServerApi,
        *,
        vocab_size: int,
        max_length: int | None,
        eos_token_ids: Collection[int],
        tensor_names: Collection[str],
        save_tensors: SaveTensors,
        sync_dir: Path,
        processes: Sequence[ServerProcess] = (),
        group: dist.ProcessGroup | None = None,
        limits: HttpLimits | None = None,
        version: int = 0,
    ) -> None:
        self._api = api
        self._limits = limits or HttpLimits()
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tensor_names = frozenset(tensor_names)
        self._save_tensors = save_tensors
        self._sync_dir = sync_dir
        self._processes = processes
        self._group = group
        self._versions = {str(version): version}  # by the name that servers give them
        self._loop = EventLoopThread(f"{api.name}-client")
        try:
            clients = [JsonClient(url) for url in urls]
            if self._is_leader:
                _remove_leftovers(sync_dir)
            self._pool = ServerPool(clients, self._limits, health_path=api.health_path)
            limit = self._on_leader(lambda: self._loop.run(self._introduce(version)))
            super().__init__(
                vocab_size=vocab_size,
                max_length=limit if max_length is None else min(limit, max_length),
                version=version,
            )
        except BaseException:
            self._end()
            raise

    async def _introduce(self, version: int) -> int:
        """Makes sure that all servers are there and tells them their version. Returns the shortest maximal length."""
        timeout_s = self._limits.control_timeout_s
        lengths: list[int] = []

        async def introduce(client: JsonClient) -> None:
            facts = await self._api.describe(client, timeout_s)
            await self._api.set_version(client, version, timeout_s)
            lengths.append(facts.max_length)

        if failures := await self._pool.tell_each(introduce):
            raise RolloutError(f"{'; '.join(failures.values())}; is it a {self._api.name} server that is up?")
        return min(lengths)

    def close(self) -> None:
        """Gives up what is in flight, closes the connections and ends the servers that were started for it."""
        self._loop.run(self._pool.close())
        self._end()

    def _end(self) -> None:
        with ExitStack() as stack:  # each is ended, whatever becomes of the others
            for process in self._processes:
                stack.callback(process.stop)
            self._loop.close()

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        return self._loop.stream(self._completions(requests))

    async def _completions(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """In order of completion; an error ends all other requests."""
        slots = asyncio.Semaphore(self._limits.max_in_flight)

        async def complete(request: GenerationRequest) -> Completion:
            async with slots:
                return await self._complete(request)

        tasks = [asyncio.create_task(complete(request)) for request in requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        except RolloutError as error:
            raise RolloutError(self._with_deaths(str(error))) from None
        finally:
            for unfinished in tasks:
                unfinished.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, request: GenerationRequest) -> Completion:
        async def call(client: JsonClient) -> Completion:
            answer = await self._api.generate(client, request, self._eos_token_ids, self._limits.request_timeout_s)
            if answer.finish_reason == "abort":
                raise ServerFault(f"server {client.url}: aborted the request")
            versions = self._versions_of(answer, request, client.url)
            _check_end(answer, request, client.url, self._eos_token_ids)
            # A greedy token is taken with certainty; servers give what it would have at temperature 1.
            is_greedy = request.sampling.temperature == 0
            return Completion(
                request_id=request.request_id,
                prompt_ids=answer.prompt_ids,
                token_ids=answer.token_ids,
                logprobs=(0.0,) * len(answer.logprobs) if is_greedy else answer.logprobs,
                finish_reason=answer.finish_reason,
                versions=versions,
            )

        return await self._pool.ask(f"request {request.request_id}", call)

    def _versions_of(self, answer: ServerAnswer, request: GenerationRequest, url: str) -> tuple[int, ...]:
        """One policy version a token."""
        versions: list[int] = []
        for name, start, end in answer.spans:
            if name not in self._versions:
                raise StaleWeights(
                    f"server {url}: holds weights of version {name!r}, which this run never gave it; was it restarted?"
                )
            if start != len(versions):
                break
            versions += [self._versions[name]] * (end - start)
        if len(versions) != len(answer.token_ids):
            raise RolloutError(
                f"request {request.request_id} at {url}: the weight versions {answer.spans} do not cover "
                f"{len(answer.token_ids)} tokens"
            )
        return tuple(versions)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        folder = self._sync_dir / f"{_FOLDER_PREFIX}{os.getpid()}-{version}"
        names: Counter[str] = Counter()
        try:
            self._save_tensors(folder, _counted(tensors, names))
            _check_names(names, self._tensor_names, version)
            # From here on answers of the new version may arrive.
            self._versions[str(version)] = version
            failures = self._on_leader(lambda: self._loop.run(self._load_everywhere(folder, version)))
        finally:
            if self._is_leader:
                shutil.rmtree(folder, ignore_errors=True)
        self._loop.run(self._refuse(failures))
        if failures:
            message = self._with_deaths(f"weight update to version {version}: {'; '.join(failures.values())}")
            if len(failures) == len(self._pool):
                raise RolloutError(message)
            _log.warning("%s; the other servers go on alone until it succeeds there", message)

    async def _load_everywhere(self, folder: Path, version: int) -> dict[str, str]:
        timeout_s = self._limits.control_timeout_s
        return await self._pool.tell_each(lambda client: self._api.load_folder(client, folder, version, timeout_s))

    async def _refuse(self, failures: dict[str, str]) -> None:
        self._pool.refuse(failures)

    @property
    def _is_leader(self) -> bool:
        return not dist.is_initialized() or dist.get_rank(self._group) == 0

    def _on_leader[T](self, work: Callable[[], T]) -> T:
        """What rank 0 makes of ``work``, result or error, on all ranks."""
        box: list[Any] = [None, None]
        if self._is_leader:
            try:
                box[0] = work()
            except RolloutError as error:
                box[1] = self._with_deaths(str(error))
        if dist.is_initialized():
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        if box[1] is not None:
            raise RolloutError(box[1])
        return box[0]

    def _with_deaths(self, message: str) -> str:
        """The message, and how those servers ended that were started for this engine and are gone."""
        return "; ".join([message, *filter(None, (process.describe_death() for process in self._processes))])


def _remove_leftovers(sync_dir: Path) -> None:
    """Gives back what a run left that was killed during an update: whole models, often in memory."""
    for folder in sync_dir.glob(f"{_FOLDER_PREFIX}*"):
        process = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _check_end(answer: ServerAnswer, request: GenerationRequest, url: str, eos_token_ids: frozenset[int]) -> None:
    """Refuses a response that ends where none of this run may end."""
    where = f"request {request.request_id} at {url}"
    tokens, limit = answer.token_ids, request.sampling.max_new_tokens
    for position, token in enumerate(tokens):
        if token in eos_token_ids and position < len(tokens) - 1:
            raise RolloutError(f"{where}: went on after the end-of-sequence token {token} at position {position}")
    ended = bool(tokens) and tokens[-1] in eos_token_ids
    if answer.finish_reason == "stop" and not ended:
        raise RolloutError(
            f"{where}: stopped without one of the end-of-sequence tokens {sorted(eos_token_ids)} as its last token "
            f"(got {tokens[-1] if tokens else 'no token'}); the server must include it and may end at no other"
        )
    if answer.finish_reason == "length" and (len(tokens) < limit or ended):
        raise RolloutError(
            f"{where}: ended for its length after {len(tokens)} of {limit} tokens; does the server have a lower limit?"
        )


def _counted(tensors: Iterator[tuple[str, torch.Tensor]], names: Counter[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        names[name] += 1
        yield name, tensor


def _check_names(names: Counter[str], expected: frozenset[str], version: int) -> None:
    """Refuses an incomplete update before a server is touched: servers would keep the old tensor, and say nothing."""
    for problem, found in (
        ("lacks", expected - names.keys()),
        ("brings the unknown", names.keys() - expected),
        ("repeats", {name for name, count in names.items() if count > 1}),
    ):
        if found:
            raise RolloutError(
                f"weight update to version {version} {problem} tensor {min(found)} ({len(found)} in all)"
            )
