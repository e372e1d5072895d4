"""Programs that end right after a call of the loss path end with status 0."""

import subprocess
import sys

import pytest

RUNS = 4


@pytest.mark.parametrize("call", ["loss", "loss-sequence-parallel", "logprobs", "loss-without-gradient"])
def test_ranks_that_end_after_a_call_end_well(call):
    """A third of such programs and more ended in SIGABRT, as a collective let its tensors go at the very end."""
    program = [sys.executable, "-m", "tests.unit_tests.rl.ops.exits", str(RUNS), call]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.splitlines() == ["0 0 0 0"] * RUNS, ended.stderr[-2000:]
