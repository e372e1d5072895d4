"""A run's record on disk: what is written, kept on resume, moved away by a new run, and refused."""

import json
import math
import os

import pytest

from megatron.rl.errors import OutputError
from megatron.rl.run_log import METRICS_FILE, RunLog, read_metrics


def _lines(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    text = (folder / METRICS_FILE).read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_one_line_a_record_on_disk_at_once_and_echoed(tmp_path):
    shown = []
    with RunLog(tmp_path / "new", rank=0, echo=shown.append) as log:
        log.write({"step": 1, "reward/mean": 0.1 + 0.2})
        assert [line["reward/mean"] for line in _lines(tmp_path / "new")] == [0.1 + 0.2]
        log.write({"step": 2, "reward/mean": 0.5})
        assert [line["step"] for line in _lines(tmp_path / "new")] == [1, 2]
        assert all(line["wall_time"] > 1e9 for line in _lines(tmp_path / "new"))
    assert shown == _lines(tmp_path / "new")


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    values = {"ratio/mean": math.nan, "ratio/max": math.inf, "ratio/min": -math.inf}
    with RunLog(tmp_path, rank=0) as log:
        log.write({"step": 1, **values})
    assert (
        _lines(tmp_path)[0].items() >= {"ratio/mean": "NaN", "ratio/max": "Infinity", "ratio/min": "-Infinity"}.items()
    )
    record = read_metrics(tmp_path)[0]
    assert math.isnan(record["ratio/mean"])
    assert (record["ratio/max"], record["ratio/min"]) == (math.inf, -math.inf)


def test_other_ranks_write_nothing(tmp_path):
    with RunLog(
        tmp_path / "run", rank=1, tensorboard_dir=tmp_path / "board", echo=lambda _: pytest.fail("echo")
    ) as log:
        log.write({"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_records_without_step_are_refused(tmp_path):
    with RunLog(tmp_path, rank=0) as log:
        with pytest.raises(ValueError, match="without an entry in METRICS: reward/typo"):
            log.write({"step": 1, "reward/typo": 0.0})
        with pytest.raises(ValueError, match="needs its step"):
            log.write({"reward/mean": 0.0})
    with pytest.raises(ValueError, match="closed"):
        log.write({"step": 1})
    assert (tmp_path / METRICS_FILE).read_text() == ""


def test_a_new_run_never_writes_behind_an_earlier_ones_records(tmp_path):
    with RunLog(tmp_path, rank=0) as log:
        log.write({"step": 1, "reward/mean": 0.1})
    with pytest.raises(OutputError, match="File exists"):
        RunLog(tmp_path, rank=0)
    assert [line["reward/mean"] for line in _lines(tmp_path)] == [0.1]


def test_a_run_that_goes_on_in_another_folder_begins_its_records_there(tmp_path):
    with RunLog(tmp_path, rank=0, resume_step=2) as log:
        log.write({"step": 3, "reward/mean": 0.9})
    assert [line["step"] for line in _lines(tmp_path)] == [3]


def test_a_resumed_run_goes_on_behind_its_checkpoint(tmp_path):
    with RunLog(tmp_path, rank=0) as log:
        for step in range(5):
            log.write({"step": step, "reward/mean": step / 10})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 5, "rew')  # killed while it wrote
    with RunLog(tmp_path, rank=0, resume_step=2) as log:
        log.write({"step": 3, "reward/mean": 0.9})
    assert [(line["step"], line["reward/mean"]) for line in _lines(tmp_path)] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 0.9),
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_full_disk_stops_the_run_in_one_line(tmp_path):
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    with (
        pytest.raises(OutputError, match="No space left on device.*free the disk") as caught,
        RunLog(tmp_path, rank=0, resume_step=0) as log,
    ):
        log.write({"step": 1})
    assert str(tmp_path / METRICS_FILE) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer thread
def test_a_full_disk_under_tensorboard_stops_the_run_too(tmp_path):
    with (
        pytest.raises(OutputError, match="board cannot be written"),
        RunLog(tmp_path, rank=0, tensorboard_dir=tmp_path / "board") as log,
    ):
        log.write({"step": 1, "reward/mean": 0.5})
        (events,) = (tmp_path / "board").iterdir()
        events.unlink()
        events.symlink_to("/dev/full")
        log.write({"step": 2, "reward/mean": 0.5})


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file/run.*cannot be written"):
        RunLog(tmp_path / "file" / "run", rank=0)


def test_tensorboard_has_the_same_numbers_and_hides_an_earlier_life(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = tmp_path / "board"
    for resume, steps, reward in ((None, (1, 2, 3), 0.25), (1, (2,), 0.5)):
        with RunLog(tmp_path, rank=0, tensorboard_dir=board, resume_step=resume) as log:
            for step in steps:
                log.write({"step": step, "reward/mean": reward})
    events = accumulator.EventAccumulator(str(board)).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
