"""The engine for servers against servers that fail in every way: nothing is lost, given twice, or made up."""

import json
import math
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.rl.config import SamplingConfig
from megatron.rl.errors import RolloutError
from megatron.rl.rollout.http_client import API_KEY_VARIABLE
from megatron.rl.rollout.http_engine import HttpEngine
from megatron.rl.rollout.server_pool import HttpLimits
from megatron.rl.rollout.sglang import SglangApi
from megatron.rl.rollout.vllm import VllmApi
from megatron.rl.types import GenerationRequest
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.rollout.fake_server import EOS, FakeServer

VOCAB = 61
PLAIN = SamplingConfig(max_new_tokens=8)
LIMITS = HttpLimits(request_timeout_s=20, control_timeout_s=5, backoff_s=0.01, max_backoff_s=0.05, probe_interval_s=0.1)
TENSORS = {"a": torch.zeros(2), "b": torch.ones(3)}
KINDS = ("vllm", "sglang")


def save(folder: Path, tensors) -> None:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")


@pytest.fixture
def make(tmp_path):
    """Makes an engine over running fake servers; all end with the test."""
    with ExitStack() as stack:

        def make_engine(*servers, limits=LIMITS, urls=None, **changes):
            for server in servers:
                stack.enter_context(server)
            options = {
                "vocab_size": VOCAB,
                "max_length": None,
                "eos_token_ids": [EOS],
                "tensor_names": TENSORS,
                "save_tensors": save,
                "sync_dir": tmp_path / "sync",
                "limits": limits,
                **changes,
            }
            kind = servers[0].kind if servers else "vllm"
            api = VllmApi() if kind == "vllm" else SglangApi(VOCAB)
            return stack.enter_context(HttpEngine(urls or [server.url for server in servers], api, **options))

        yield make_engine


def requests(count: int, sampling: SamplingConfig = PLAIN) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{index}", (index % 50 + 3, 5), sampling, seed=index) for index in range(count)]


def ids(completions) -> list[str]:
    return sorted(completion.request_id for completion in completions)


def fail_first(times: int, fault: str, route: str = "generate"):
    left = [times]

    def plan(path, body):
        if path.endswith(route) and left[0]:
            left[0] -= 1
            return fault
        return None

    return plan


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_logprobs_come_back_as_the_server_gave_them(make, kind):
    engine = make(FakeServer(kind))
    [completion] = engine.generate([GenerationRequest("x", (8, 9), PLAIN, seed=1)])
    assert completion.prompt_ids == (8, 9)
    assert completion.token_ids == (6, 4, EOS)
    assert completion.logprobs == (-0.5, -0.5, -0.5)
    assert completion.finish_reason == "stop"
    assert completion.versions == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_cut_at_the_limit_ends_for_its_length(make, kind):
    [completion] = make(FakeServer(kind)).generate(requests(1, SamplingConfig(max_new_tokens=2)))
    assert (len(completion.token_ids), completion.finish_reason) == (2, "length")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_is_all_of_the_sampling_and_no_text(make, kind):
    server = FakeServer(kind)
    list(make(server).generate(requests(1, SamplingConfig(5, temperature=0.6, top_p=0.9, top_k=7))))
    [body] = server.generated()
    sent = body["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.6, 0.9, 7)
    assert sent["stop_token_ids"] == [EOS]
    assert body["token_ids" if kind == "vllm" else "input_ids"] == [3, 5]
    assert "prompt" not in body
    assert "text" not in body


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_certain(make, kind):
    [completion] = make(FakeServer(kind)).generate(requests(1, replace(PLAIN, temperature=0.0)))
    assert completion.logprobs == (0.0, 0.0, 0.0)


def test_sglang_gives_the_truncated_distributions_logprobs_only_if_asked(make):
    server = FakeServer("sglang")
    [completion] = make(server).generate(requests(1, replace(PLAIN, top_p=0.9)))
    assert completion.logprobs == (-0.25, -0.25, -0.25)
    assert server.generated()[0]["sampling_params"]["top_k"] == VOCAB  # no truncation, and finite as SGLang wants it


@pytest.mark.parametrize("fault", ["500", "503", "429", "reset", "dies", "truncated"])
def test_a_request_that_failed_is_asked_again(make, fault):
    server = FakeServer()
    engine = make(server)
    server.fault = fail_first(3, fault)
    assert ids(engine.generate(requests(4))) == ids(requests(4))
    assert len(server.generated()) == 7


@pytest.mark.parametrize("fault", ["500", "reset", "dies", "truncated"])
def test_one_broken_server_loses_nothing_and_doubles_nothing(make, fault):
    broken, sound = FakeServer(), FakeServer()
    engine = make(broken, sound)
    broken.fault = lambda path, body: fault if path.endswith("generate") else None
    assert ids(engine.generate(requests(40))) == ids(requests(40))
    assert broken.generated()


def test_a_server_that_dies_in_mid_rollout_is_replaced_by_the_others(make):
    dying, sound = FakeServer(), FakeServer()
    engine = make(dying, sound, limits=replace(LIMITS, max_in_flight=4))
    stream = engine.generate(requests(60))
    first = [next(stream) for _ in range(10)]
    dying.stop()
    assert ids([*first, *stream]) == ids(requests(60))


def test_a_server_that_hangs_is_found_by_its_health_route(make):
    hanging, sound = FakeServer(), FakeServer()
    engine = make(hanging, sound)
    hanging.fault = lambda path, body: "hang"
    assert ids(engine.generate(requests(8))) == ids(requests(8))


def test_a_slow_server_that_is_healthy_is_waited_for(make):
    server = FakeServer()
    engine = make(server, limits=replace(LIMITS, probe_interval_s=0.02))
    server.fault = fail_first(1, "hang")
    stream = engine.generate(requests(1))
    probes = lambda: server.paths().count("/health")  # noqa: E731
    answered = []
    thread = threading.Thread(target=lambda: answered.extend(stream))
    thread.start()
    while probes() < 8:
        thread.join(0.01)
    assert not answered
    server.released.set()  # its connection closes then, and the request is made again
    thread.join()
    assert ids(answered) == ["r0"]


def test_a_request_that_never_succeeds_ends_the_run_with_its_name_and_the_server(make):
    server = FakeServer()
    engine = make(server)
    server.fault = lambda path, body: "500" if path.endswith("generate") else None
    with pytest.raises(RolloutError, match=f"request r0: failed 5 times.*{server.url}.*status 500.*planted fault") as e:
        list(engine.generate(requests(1)))
    assert "\n" not in str(e.value)
    assert len(server.generated()) == 5


def test_a_time_out_is_a_fault_of_the_server(make):
    server = FakeServer()
    engine = make(server, limits=replace(LIMITS, request_timeout_s=0.2, attempts=2, probe_interval_s=10))
    server.fault = lambda path, body: "hang" if path.endswith("generate") else None
    with pytest.raises(RolloutError, match=r"request r0: failed 2 times.*no answer within 0.2 s"):
        list(engine.generate(requests(1)))


@pytest.mark.parametrize("status", ["400", "401", "404", "422"])
def test_what_a_server_refuses_is_not_asked_again(make, status):
    server = FakeServer()
    engine = make(server)
    server.fault = lambda path, body: status if path.endswith("generate") else None
    with pytest.raises(RolloutError, match=f"refused with status {status}.*planted fault"):
        list(engine.generate(requests(1)))
    assert len(server.generated()) == 1


def edit(path, value):
    """Sets what lies at a path of an answer; ``...`` as value takes it out."""

    def change(answer):
        *parents, last = path
        place = answer
        for key in parents:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
        return answer

    return change


VLLM, SGLANG = ("choices", 0), ("meta_info",)
NAN = math.nan


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("vllm", (*VLLM, "logprobs", "content", 1, "logprob"), None, "position 1 has log-probability None"),
        ("vllm", (*VLLM, "logprobs", "content", 1, "logprob"), -9999.0, "position 1 .*-9999.*not finite"),
        ("vllm", (*VLLM, "logprobs", "content", 1, "logprob"), NAN, "position 1 .* nan"),
        ("vllm", (*VLLM, "logprobs", "content", 0, "logprob"), -math.inf, "position 0 .*-inf"),
        ("vllm", (*VLLM, "logprobs", "content", 0, "logprob"), "-0.5", "position 0 has log-probability '-0.5'"),
        ("vllm", (*VLLM, "logprobs", "content", 0, "logprob"), 0.1, "position 0 .* 0.1"),
        ("vllm", (*VLLM, "logprobs", "content", 1, "token_id"), 9, "position 1 has token 4 but .* of 9"),
        ("vllm", (*VLLM, "logprobs", "content"), [], "3 tokens came with 0 log-probabilities"),
        ("vllm", (*VLLM, "logprobs"), None, "choices.0.logprobs.content is missing"),
        ("vllm", (*VLLM, "token_ids"), ..., "choices.0.token_ids is missing"),
        ("vllm", (*VLLM, "token_ids"), ["6", "4"], "choices.0.token_ids is no list of whole numbers"),
        ("vllm", ("choices",), [], "choices.0 is missing"),
        ("vllm", ("prompt_token_ids",), [1, 3, 5], "changed the prompt's token ids"),
        ("vllm", ("prompt_token_ids",), None, "prompt_token_ids is no list"),
        ("vllm", (*VLLM, "finish_reason"), "error", "finish_reason is 'error'"),
        ("vllm", (*VLLM, "finish_reason"), "length", "ended for its length after 3 of 8 tokens"),
        ("vllm", (*VLLM, "weight_versions"), None, "no list of weight versions"),
        ("vllm", (*VLLM, "weight_versions", 0, "end"), 2, "do not cover 3 tokens"),
        ("sglang", (*SGLANG, "output_token_logprobs", 1, 0), None, "position 1 has log-probability None"),
        ("sglang", (*SGLANG, "output_token_logprobs", 2, 0), NAN, "position 2 .* nan"),
        ("sglang", (*SGLANG, "output_token_logprobs", 1, 1), 7, "position 1 has token 4 but .* of 7"),
        ("sglang", (*SGLANG, "output_token_logprobs"), None, "3 tokens came with 0 log-probabilities"),
        ("sglang", (*SGLANG, "finish_reason", "matched"), "NaN happened", "position 2: .*'NaN happened'"),
        ("sglang", ("prompt_token_ids",), [5, 3], "changed the prompt's token ids"),
        ("sglang", ("output_ids",), [6, 4], r"versions .* do not cover 2 tokens"),
        ("sglang", (*SGLANG, "finish_reason", "type"), None, "finish_reason.type is None"),
    ],
)
def test_an_answer_that_is_not_right_is_refused_with_its_request(make, kind, path, value, message):
    server = FakeServer(kind)
    engine = make(server)
    server.change = edit(path, value)
    with pytest.raises(RolloutError, match=f"request r0.*{message}") as caught:
        list(engine.generate(requests(1)))
    assert "\n" not in str(caught.value)
    assert len(server.generated()) == 1  # it would be as wrong the next time


def test_ids_that_go_on_after_the_end_are_refused(make):
    server = FakeServer()
    engine = make(server, eos_token_ids=[4, EOS])
    with pytest.raises(RolloutError, match="went on after the end-of-sequence token 4 at position 1"):
        list(engine.generate(requests(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_is_none_of_this_run_is_refused(make, kind):
    engine = make(FakeServer(kind), eos_token_ids=[9])
    with pytest.raises(RolloutError, match=r"r0.*stopped without one of the end-of-sequence tokens \[9\].*got 2"):
        list(engine.generate(requests(1)))


def test_an_aborted_response_is_asked_again(make):
    server = FakeServer()
    engine = make(server)
    aborted = []

    def change(answer):
        if not aborted:
            aborted.append(answer["choices"][0].update(finish_reason="abort"))
        return answer

    server.change = change
    [completion] = engine.generate(requests(1))
    assert completion.finish_reason == "stop"


def test_versions_by_span(make):
    server = FakeServer()
    engine = make(server)
    engine.update_weights(iter(TENSORS.items()), version=1)
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 3}]
    server.change = edit((*VLLM, "weight_versions"), spans)
    [completion] = engine.generate(requests(1))
    assert completion.versions == (0, 1, 1)


def test_a_server_that_was_restarted_gets_no_requests_until_the_next_update(make):
    restarted, sound = FakeServer(), FakeServer()
    engine = make(restarted, sound)
    restarted.version = "default"
    assert ids(engine.generate(requests(20))) == ids(requests(20))
    asked = len(restarted.generated())
    assert ids(engine.generate(requests(20))) == ids(requests(20))
    assert len(restarted.generated()) == asked
    engine.update_weights(iter(TENSORS.items()), version=1)
    assert ids(engine.generate(requests(20))) == ids(requests(20))
    assert len(restarted.generated()) > asked


def test_where_all_were_restarted_the_reason_is_told(make):
    server = FakeServer()
    engine = make(server)
    server.version = "default"
    with pytest.raises(RolloutError, match="request r0: no server holds the policy's weights.*'default'.*restarted"):
        list(engine.generate(requests(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_pauses_loads_flushes_sets_the_version_and_resumes(make, tmp_path, kind):
    servers = [FakeServer(kind), FakeServer(kind)]
    engine = make(*servers)
    seen = []

    def look(path, body):
        if path in ("/collective_rpc", "/update_weights_from_disk"):
            seen.append(load_file(next(tmp_path.rglob("*.safetensors"))))

    for server in servers:
        server.fault = look
    engine.update_weights(iter(TENSORS.items()), version=7)
    assert engine.version == 7
    assert all(torch.equal(seen[0][name], TENSORS[name]) for name in TENSORS)
    for server in servers:
        expected = {
            "vllm": [
                "/pause?mode=keep",
                "/collective_rpc",
                "/reset_prefix_cache?reset_running_requests=true",
                "/update_weight_version",
                "/resume",
            ],
            "sglang": ["/pause_generation", "/update_weights_from_disk", "/continue_generation"],
        }[kind]
        assert server.paths()[-len(expected) :] == expected
        assert (server.version, server.paused) == ("7", False)
    assert not list(tmp_path.rglob("*.safetensors"))  # shared memory is given back
    assert {v for completion in engine.generate(requests(4)) for v in completion.versions} == {7}


@pytest.mark.parametrize(
    "route", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
)
def test_a_server_whose_update_failed_takes_no_more_requests(make, caplog, route):
    failing, sound = FakeServer(), FakeServer()
    engine = make(failing, sound)
    failing.fault = lambda path, body: "500" if path == route else None
    engine.update_weights(iter(TENSORS.items()), version=1)
    assert failing.url in caplog.text
    assert route in caplog.text
    completions = list(engine.generate(requests(20)))
    assert ids(completions) == ids(requests(20))
    assert {v for completion in completions for v in completion.versions} == {1}
    assert not failing.generated()
    failing.fault = lambda path, body: None
    engine.update_weights(iter(TENSORS.items()), version=2)
    assert len(list(engine.generate(requests(20)))) == 20
    assert failing.generated()


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_server_took_the_update_the_engine_stops(make, kind):
    server = FakeServer(kind)
    engine = make(server)
    server.fault = lambda path, body: "500" if path in ("/collective_rpc", "/update_weights_from_disk") else None
    with pytest.raises(RolloutError, match="weight update to version 1.*status 500.*planted fault") as caught:
        engine.update_weights(iter(TENSORS.items()), version=1)
    assert "\n" not in str(caught.value)
    with pytest.raises(RolloutError, match="half updated"):
        engine.generate(requests(1))
    assert server.paused
    server.fault = lambda path, body: None
    engine.update_weights(iter(TENSORS.items()), version=1)
    assert len(list(engine.generate(requests(3)))) == 3


def test_a_cache_that_was_not_flushed_fails_the_update(make):
    server = FakeServer()
    engine = make(server)
    plain = server.answer
    server.answer = lambda path, body: {"success": False} if path == "/reset_prefix_cache" else plain(path, body)
    with pytest.raises(RolloutError, match="did not flush its prefix cache"):
        engine.update_weights(iter(TENSORS.items()), version=1)


def test_a_connection_that_broke_once_does_not_fail_an_update(make):
    server = FakeServer()
    engine = make(server)
    server.fault = fail_first(1, "reset", "/collective_rpc")
    engine.update_weights(iter(TENSORS.items()), version=1)
    assert len(server.loaded) == 1


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("a", torch.zeros(2))], r"lacks tensor b \(1 in all\)"),
        ([*TENSORS.items(), ("c", torch.zeros(1))], "brings the unknown tensor c"),
        ([*TENSORS.items(), ("a", torch.zeros(2))], "repeats tensor a"),
    ],
)
def test_an_update_with_other_tensors_touches_no_server(make, stream, message):
    server = FakeServer()
    engine = make(server)
    with pytest.raises(RolloutError, match=f"weight update to version 1 {message}"):
        engine.update_weights(iter(stream), version=1)
    assert not server.loaded
    assert not server.paused


def test_what_a_killed_run_left_behind_is_removed_and_nothing_else(make, tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    name = f"sync/weights-{socket.gethostname()}"
    left, live, other = (tmp_path / f"{name}-{ended.pid}-3", tmp_path / f"{name}-1-3", tmp_path / "sync/other")
    for folder in (left, live, other):
        folder.mkdir(parents=True)
    make(FakeServer())
    assert [left.exists(), live.exists(), other.exists()] == [False, True, True]


def test_requests_in_flight_are_bounded(make):
    server = FakeServer()
    engine = make(server, limits=replace(LIMITS, max_in_flight=3))
    server.fault = fail_first(3, "hang")
    stream = engine.generate(requests(9))
    answered = []
    thread = threading.Thread(target=lambda: answered.extend(stream))
    thread.start()
    while len(server.generated()) < 3 or server.paths().count("/health") < 3:
        thread.join(0.01)
    assert len(server.generated()) == 3
    server.released.set()
    thread.join()
    assert ids(answered) == ids(requests(9))


def test_completions_come_as_they_finish(make):
    server = FakeServer()
    engine = make(server)
    server.fault = lambda path, body: "hang" if body and body.get("token_ids") == [3, 5] else None
    stream = engine.generate(requests(6))
    first = ids(next(stream) for _ in range(5))
    assert first == ["r1", "r2", "r3", "r4", "r5"]
    stream.close()  # the one that hangs is given up


def test_no_requests(make):
    assert list(make(FakeServer()).generate([])) == []


def test_the_servers_own_length_counts(make):
    short, long = FakeServer(), FakeServer()
    short.max_length = 9
    engine = make(long, short, max_length=100)
    with pytest.raises(RolloutError, match="exceed the model's 9 positions"):
        engine.generate(requests(1))


def test_a_key_is_taken_from_the_environment_and_sent(make, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "sesame")
    server = FakeServer()
    list(make(server).generate(requests(1)))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer sesame"}


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://x", "http://", "http://a\nb"])
def test_what_is_no_address_is_said(make, url):
    with pytest.raises(RolloutError, match="write it as http://HOST:PORT") as caught:
        make(urls=[url])
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_said_at_start(make):
    with FakeServer() as gone:
        pass
    with pytest.raises(RolloutError, match=f"{gone.url}.*is it a vllm server that is up"):
        make(urls=[gone.url])


def test_a_server_of_another_kind_is_said_at_start(make):
    server = FakeServer()
    server.answer = lambda path, body: {"hello": json.dumps(path)}
    with pytest.raises(RolloutError, match="data is missing in the server's answer.*is it a vllm server"):
        make(server)


def _on_rank(rank: int, ranks: int, urls: list[str], folder: str) -> dict[str, object]:
    """Rank 0 alone changes the servers; every rank learns what came of it."""

    def save_on_first(path, tensors):
        tensors = dict(tensors)
        if rank == 0:
            save(path, tensors)

    engine = HttpEngine(
        urls,
        VllmApi(),
        vocab_size=VOCAB,
        max_length=None,
        eos_token_ids=[EOS],
        tensor_names=TENSORS,
        save_tensors=save_on_first,
        sync_dir=Path(folder),
        limits=LIMITS,
    )
    with engine:
        engine.update_weights(iter(TENSORS.items()), version=1)
        mine = requests(20)[rank::ranks]
        completions = list(engine.generate(mine))
        assert ids(completions) == ids(mine)
        return {"versions": {v for completion in completions for v in completion.versions}, "limit": engine._max_length}


def test_rank_0_updates_and_all_ranks_know_which_servers_took_it(tmp_path):
    failing, sound = FakeServer(), FakeServer()
    failing.fault = lambda path, body: "500" if path == "/collective_rpc" else None
    sound.max_length = 40
    with failing, sound:
        results = run_ranks(2, _on_rank, [failing.url, sound.url], str(tmp_path))
    assert results == [{"versions": {1}, "limit": 40}] * 2
    assert not failing.generated()
    assert len(sound.generated()) == 20
    assert sound.paths().count("/collective_rpc") == 1
    assert sound.version == "1"
