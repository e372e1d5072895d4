"""What a person sees: time left, plain lines, the bar on a terminal, the table at the start."""

import io

import pytest

from megatron.rl.progress import ProgressDisplay, TimeLeft, banner, eval_line, format_seconds, step_line

STEP = {
    "step": 3,
    "reward/mean": 0.4125,
    "response/length": 12.34,
    "policy/entropy": 0.8,
    "tv/mean": 0.00123,
    "train/grad_norm": 0.31,
    "speed/tokens_per_second": 1234.5,
    "time/step": 2.0,
}
EVALUATION = {"step": 3, "eval/reward": 0.5, "eval/pass_at_k": 0.75, "eval/response_length": 9.0, "time/eval": 4.2}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (125, "2m05s"), (11220, "3h07m"), (187200, "2d04h")],
)
def test_times_read_well(seconds, text):
    assert format_seconds(seconds) == text


def test_time_left_counts_steps_and_evaluations():
    left = TimeLeft(steps=10, eval_interval=4)  # evaluations after 0, 4, 8 and 10
    left.evaluation(0, 7.0)
    assert left.seconds() is None
    left.step(1, 2.0)
    assert left.seconds() == 9 * 2 + 3 * 7
    for step in (2, 3, 4):
        left.step(step, 2.0)
    assert left.seconds() == 6 * 2 + 3 * 7  # the one after step 4 is still to come
    left.evaluation(4, 7.0)
    assert left.seconds() == 6 * 2 + 2 * 7
    for step in range(5, 11):
        left.step(step, 2.0)
    assert left.seconds() == 2 * 7
    left.evaluation(10, 7.0)
    assert left.seconds() == 0


@pytest.mark.parametrize(("interval", "evaluations"), [(0, 1), (1, 9), (3, 3), (9, 1), (20, 1)])
def test_time_left_knows_how_many_evaluations_come(interval, evaluations):
    left = TimeLeft(steps=9, eval_interval=interval)
    left.evaluation(0, 100.0)
    left.step(1, 0.0)
    assert left.seconds() == evaluations * 100


def test_time_left_is_not_moved_by_one_slow_step():
    left = TimeLeft(steps=100, eval_interval=0)
    for step in range(1, 6):
        left.step(step, 60.0 if step in (1, 4) else 1.0)
    assert left.seconds() == 95


def test_time_left_follows_a_lasting_change():
    left = TimeLeft(steps=100, eval_interval=0)
    for step in range(1, 61):
        left.step(step, 1.0 if step <= 40 else 3.0)
    assert left.seconds() == 40 * 3


def test_time_left_of_a_resumed_run():
    left = TimeLeft(steps=10, eval_interval=4, start_step=8)
    left.step(9, 1.0)
    left.evaluation(0, 5.0)
    left = TimeLeft(steps=10, eval_interval=4, start_step=8)
    left.step(9, 1.0)
    assert left.seconds() == 1.0


def test_a_steps_line():
    assert step_line(STEP, 40, 130) == (
        "step  3/40 | reward 0.412 | length 12.3 | entropy 0.800 | tv 1.2e-03 | grad 0.31 | tok/s 1,234 | 2m10s left"
    )
    assert step_line({"step": 7}, 9, None) == "step 7/9 | ? left"


def test_troubles_are_in_the_line_only_where_there_are_any():
    record = {"step": 1, "ratio/nonfinite": 2, "reward/timeouts": 0, "train/skipped_updates": 1}
    assert step_line(record, 1, 0) == "step 1/1 | ratios not finite: 2 | updates skipped: 1 | 0s left"
    assert "rewards timed out: 3" in eval_line(EVALUATION | {"eval/timeouts": 3, "eval/errors": 0}, 9)


def test_an_evaluations_line():
    assert eval_line(EVALUATION, 40) == "eval  3/40 | reward 0.500 | pass@k 0.750 | length 9.0 | took 4s"


def _shown(records, **options):
    stream = io.StringIO()
    with ProgressDisplay(9, **({"rank": 0, "eval_interval": 3} | options), stream=stream) as display:
        for record in records:
            display.phase("train")
            display.show(record)
    return stream.getvalue().splitlines()


def test_elsewhere_than_on_a_terminal_one_plain_line_each():
    lines = _shown([EVALUATION | {"step": 0}, STEP | {"step": 1}, STEP | {"step": 2}])
    assert [line.split(" |")[0] for line in lines] == ["eval 0/9", "step 1/9", "step 2/9"]
    assert "\x1b" not in "".join(lines)
    assert lines[-1].endswith("27s left")  # 7 steps of 2 s, 3 evaluations of 4.2 s


def test_a_record_may_be_both_or_neither():
    assert len(_shown([STEP | EVALUATION])) == 2
    assert _shown([{"step": 0, "mismatch/tv": 0.1}]) == []


def test_lines_at_most_every_so_often_but_never_without_the_first_the_last_and_troubles():
    times = iter([0.0, 1.0, 5.0, 6.0, 10.1, 11.0, 12.0, 13.0])
    records = [STEP | {"step": step} for step in range(1, 10)]
    records[6] = records[6] | {"ratio/nonfinite": 1}
    lines = _shown(records, every_s=5.0, clock=lambda: next(times))
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, 3, 5, 7, 9]


def test_other_ranks_show_nothing():
    assert _shown([STEP, EVALUATION], rank=1) == []


def test_a_terminal_gets_a_bar_and_the_lines(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with ProgressDisplay(9, rank=0, eval_interval=3, stream=stream) as display:
        display.phase("rollout")
        display.show(STEP)
        display.show(EVALUATION)
        display.note("a [note] with brackets")
    text = stream.getvalue()
    for part in ("step 3/9", "reward 0.412", "eval 0.500", "s left", "done", "a [note] with brackets", "\x1b["):
        assert part in text, part
    assert text.endswith("\x1b[?25h")  # the cursor is back


def test_a_bar_ends_failed_after_an_exception(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with pytest.raises(KeyError), ProgressDisplay(9, rank=0, eval_interval=3, stream=stream):
        raise KeyError
    assert "failed" in stream.getvalue()


@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_the_table_at_the_start(stream_type, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = stream_type()
    banner([("model", "tiny [2 layers]"), ("loss", "drpo")], title="DRPO", stream=stream)
    for part in ("DRPO", "model", "tiny [2 layers]", "loss"):
        assert part in stream.getvalue(), part
    if stream_type is io.StringIO:
        assert stream.getvalue() == "DRPO\n  model  tiny [2 layers]\n  loss   drpo\n"
