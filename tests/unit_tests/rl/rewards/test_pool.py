import os
import re
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import CancelledError

import pytest

from megatron.rl.errors import RewardError
from megatron.rl.rewards.pool import WorkerPool
from tests.unit_tests.rl.rewards.items import item, runs, wait_until_ended

FAKES = "tests.unit_tests.rl.rewards.fakes"
PATIENT = 60.0


def pool(function: str = "obey", workers: int = 2, timeout_s: float = PATIENT) -> WorkerPool:
    return WorkerPool(f"{FAKES}:{function}", workers=workers, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def obedient():
    with pool() as scorer:
        yield scorer


def statuses(results):
    return [result.status for result in results]


def test_a_thousand_quick_items_come_back_in_order(obedient):
    results = obedient.score([item(f"value {i / 8}") for i in range(1000)])
    assert [result.score for result in results] == [i / 8 for i in range(1000)]
    assert set(statuses(results)) == {"ok"}


def test_no_items_no_results(obedient):
    assert obedient.score([]) == []


def test_scoring_starts_when_an_item_is_submitted(obedient):
    early = obedient.submit(item("value 2"))
    assert early.result(timeout=PATIENT).score == 2.0
    assert obedient.submit(item("value 3")).result(timeout=PATIENT).score == 3.0


@pytest.mark.parametrize("hang", ["sleep 3600", "hang-in-python", "hang-in-c"])
def test_a_hung_worker_is_replaced_and_only_its_item_times_out(hang):
    """verl PR #5839 hung, and AReaL PR #1426's pool starved: both workers hang here, twice each."""
    with pool(timeout_s=0.5) as scorer:
        before = scorer.pids
        results = scorer.score([item(hang)] * 4 + [item("value 1")] * 3)
        assert statuses(results) == ["timeout"] * 4 + ["ok"] * 3
        assert results[0].score == 0.0
        assert results[0].detail == "no score within 0.5 s"
        assert set(before).isdisjoint(scorer.pids)
        assert wait_until_ended(before) == []


def test_an_item_whose_worker_died_is_scored_again(obedient, tmp_path):
    results = obedient.score([item(f"die-once {tmp_path / 'died'}"), *[item("value 0.5")] * 5])
    assert [result.score for result in results] == [1.0] + [0.5] * 5
    assert set(statuses(results)) == {"ok"}


def test_an_item_that_always_kills_its_worker_is_an_error_and_no_other_is_lost(obedient):
    results = obedient.score([item("value 1"), item("die 7"), *[item("value 1")] * 5])
    assert statuses(results) == ["ok", "error"] + ["ok"] * 5
    assert results[1].score == 0.0
    assert results[1].detail == "the scoring process died 2 times: its exit status is 7"


def test_a_worker_killed_while_idle_costs_no_item(obedient):
    obedient.score([item("value 1")] * 4)
    for pid in obedient.pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_ended(obedient.pids) == []
    assert statuses(obedient.score([item("value 1")] * 4)) == ["ok"] * 4


def test_a_worker_killed_while_it_starts_costs_no_item():
    with pool() as scorer:
        for pid in scorer.pids:
            os.kill(pid, signal.SIGKILL)
        assert statuses(scorer.score([item("value 1")] * 4)) == ["ok"] * 4


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        ("raise it went wrong", "ValueError: it went wrong"),
        ("unknown", "KeyError: 'unknown'"),
        ("value nan", "the score is nan"),
        ("value -inf", "the score is -inf"),
        ("allocate 64", "MemoryError: "),
    ],
)
def test_a_reward_that_fails_is_an_error_and_its_worker_stays(obedient, response, detail):
    obedient.score([item("value 1")] * 4)
    before = obedient.pids
    (result,) = obedient.score([item(response)])
    assert (result.score, result.status, result.detail) == (0.0, "error", detail)
    assert obedient.pids == before


def test_what_a_reward_prints_does_not_disturb_the_replies(obedient):
    assert statuses(obedient.score([item("print hello"), item("value 1"), item("print bye")])) == ["ok"] * 3


def test_any_text_arrives_whole():
    """Empty, more than a pipe holds, beyond the basic plane, and half a surrogate pair."""
    texts = ["", "x" * 3_000_000, "Σ七🙂" * 50_000, "\ud800", "a\0b\r\n"]
    with pool("sizes", workers=1) as scorer:
        results = scorer.score([item(text, answer="é" * 7, metadata={"a": [1], "b": None}) for text in texts])
    assert [result.score for result in results] == pytest.approx([len(text) + 0.007002 for text in texts])


def test_workers_score_in_their_main_thread_and_import_nothing_heavy():
    """verl #3407: math-verify outside of the main thread silently gave 0."""
    with pool("is_clean", workers=1) as scorer:
        assert scorer.score([item("")])[0].score == 1.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{FAKES}:absent", "cannot load it: AttributeError: .*absent"),
        ("tests.unit_tests.rl.rewards.dies_at_import:score", "does not start: its exit status is 5"),
        ("no_such_module:score", "cannot load it: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_an_error_for_every_item(spec, message):
    with WorkerPool(spec, workers=2, timeout_s=PATIENT) as scorer:
        futures = [scorer.submit(item("value 1")) for _ in range(5)]
        for future in futures:
            with pytest.raises(RewardError, match=f"{re.escape(spec)} {message}"):
                future.result(timeout=PATIENT)


def test_close_cancels_what_is_not_scored_and_ends_the_workers():
    scorer = pool()
    assert scorer.score([item("value 1")])[0].score == 1.0
    pids = scorer.pids
    futures = [scorer.submit(item("sleep 3600")) for _ in range(6)]
    scorer.close()
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=PATIENT)
    assert not any(runs(pid) for pid in pids)
    scorer.close()
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit(item("value 1"))


def test_close_before_the_workers_have_started():
    scorer = pool()
    future = scorer.submit(item("value 1"))
    pids = scorer.pids
    scorer.close()
    assert future.cancelled() or isinstance(future.exception(timeout=PATIENT), CancelledError)
    assert not any(runs(pid) for pid in pids)


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_worker_outlives_its_parent(ending):
    """Idle, hung in Python, and hung inside of a C call that keeps even a watching thread from running."""
    program = f"""
        import os, signal, sys
        from megatron.rl.rewards.pool import WorkerPool
        from tests.unit_tests.rl.rewards.items import item
        scorer = WorkerPool("{FAKES}:obey", workers=3, timeout_s=1.0)
        scorer.score([item("sleep 0.3")] * 3)  # long enough for all three to be ready
        print(*scorer.pids, flush=True)
        scorer.submit(item("hang-in-c")), scorer.submit(item("hang-in-python"))
        scorer.score([item("value 1")])
        {ending}
    """
    parent = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENT,
    )
    pids = [int(pid) for pid in parent.stdout.split()]
    assert len(pids) == 3
    assert wait_until_ended(pids) == []
