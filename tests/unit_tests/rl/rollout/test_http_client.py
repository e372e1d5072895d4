"""The background thread: errors reach the caller, and what nobody waits for any more is ended."""

import asyncio
import threading

import pytest

from megatron.rl.rollout.http_client import EventLoopThread, JsonClient, ServerFault
from tests.unit_tests.rl.rollout.fake_server import FakeServer


@pytest.fixture
def loop():
    thread = EventLoopThread("test")
    yield thread
    thread.close()


def test_results_and_errors_come_back(loop):
    async def give(value):
        if value is None:
            raise KeyError("no value")
        return value

    assert loop.run(give(5)) == 5
    with pytest.raises(KeyError, match="no value"):
        loop.run(give(None))


def test_a_stream_gives_what_came_before_its_error(loop):
    async def items():
        yield 1
        yield 2
        raise ValueError("then this")

    stream = loop.stream(items())
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(ValueError, match="then this"):
        next(stream)


def test_a_stream_that_is_left_is_ended(loop):
    ended = threading.Event()

    async def items():
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            ended.set()

    stream = loop.stream(items())
    next(stream)
    stream.close()
    assert ended.wait(20)


def test_closing_ends_what_runs(loop):
    cancelled = threading.Event()

    async def forever():
        try:
            yield await asyncio.sleep(1000)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    loop.stream(forever())
    loop.run(asyncio.sleep(0))
    loop.close()
    assert cancelled.is_set()
    loop.close()  # again is no error


def test_an_empty_answer_is_none_and_every_fault_is_one_line(loop):
    with FakeServer() as server:
        client = JsonClient(server.url + "/")
        server.answer = lambda path, body: "x"
        assert loop.run(client.get("/anything", timeout_s=5)) == "x"
        for fault in ("500", "reset", "truncated"):
            server.fault = lambda path, body, fault=fault: fault
            with pytest.raises(ServerFault, match=f"server {server.url}, POST /there: ") as caught:
                loop.run(client.post("/there?mode=x", {"a": 1}, timeout_s=5))
            assert "\n" not in str(caught.value)
        loop.run(client.close())
