"""Whose a folder is: what is set aside, what is refused, and what a run that was killed at any moment leaves."""

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.rl.errors import OutputError
from megatron.rl.run_log import Places, check_places, hold_places

BEGAN = 1_700_000_000.0
HELD = """
import sys
from pathlib import Path
from megatron.rl.run_log import Places, hold_places
run_dir = Path(sys.argv[1])
with hold_places(Places("first", run_dir, run_dir / "checkpoints", run_dir / "tensorboard", False, ())):
    print("held", flush=True)
    sys.stdin.read()
"""


def _places(tmp_path: Path, run: str = "second", **changes) -> Places:
    run_dir = tmp_path / "run"
    return replace(Places(run, run_dir, run_dir / "checkpoints", run_dir / "tensorboard", False, ()), **changes)


def _leave_a_run(folder: Path, run: str = "first") -> None:
    """What an earlier run leaves, and a file that is not its own."""
    for name in ("checkpoints", "hf", "plots", "tensorboard"):
        (folder / name).mkdir(parents=True)
        (folder / name / "content").write_text(run)
    for name in ("metrics.jsonl", "tokens.npz", "notes.txt"):
        (folder / name).write_text(run)
    (folder / "run.json").write_text(json.dumps({"run": run, "began": BEGAN}))


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


LEFT = {
    *("metrics.jsonl", "tokens.npz", "run.json"),
    *(f"{name}/content" for name in ("checkpoints", "hf", "plots", "tensorboard")),
}


def _aside(tmp_path: Path) -> list[Path]:
    return sorted(path for path in tmp_path.iterdir() if path.name.startswith("run."))


def test_a_new_folder_is_the_runs(tmp_path):
    with hold_places(_places(tmp_path)) as notes:
        assert notes == []
        assert json.loads((tmp_path / "run" / "run.json").read_text())["run"] == "second"
    assert _tree(tmp_path) == {"run/run.json"}


def test_an_earlier_run_is_set_aside_under_the_time_when_it_began(tmp_path):
    _leave_a_run(tmp_path / "run")
    with hold_places(_places(tmp_path)) as notes:
        (target,) = _aside(tmp_path)
    assert target.name.startswith("run.2023-11-1")  # in any time zone
    assert notes == [f"an earlier run's files in {tmp_path / 'run'} are now in {target}"]
    assert _tree(target) == LEFT
    assert _tree(tmp_path / "run") == {"run.json", "notes.txt"}, "what is not a run's stays"
    assert json.loads((target / "run.json").read_text())["run"] == "first"


def test_several_earlier_runs_are_kept_apart(tmp_path):
    for number in range(3):
        _leave_a_run(tmp_path / "run", run=f"earlier {number}")
        with hold_places(_places(tmp_path)):
            pass
        for name in ("run.json", "notes.txt"):
            (tmp_path / "run" / name).unlink()
    runs = [json.loads((folder / "run.json").read_text())["run"] for folder in _aside(tmp_path)]
    assert sorted(runs) == ["earlier 0", "earlier 1", "earlier 2"]
    assert all(_tree(folder) == LEFT for folder in _aside(tmp_path))


@pytest.mark.parametrize("moves", range(8))
def test_what_was_set_aside_in_part_is_set_aside_whole_by_the_next_run(tmp_path, monkeypatch, moves):
    _leave_a_run(tmp_path / "run")
    rename, done = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        try:
            with hold_places(_places(tmp_path, run="killed")):
                pass
        except KeyboardInterrupt:
            pass
    with hold_places(_places(tmp_path)):
        whole = [folder for folder in _aside(tmp_path) if "metrics.jsonl" in _tree(folder)]
    assert [_tree(folder) for folder in whole] == [LEFT]
    assert _tree(tmp_path / "run") == {"run.json", "notes.txt"}


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    _leave_a_run(tmp_path / "run")
    for record in ("whole", "cut off"):
        if record == "cut off":  # killed while the name was written; the checkpoints say whose the folder is
            (tmp_path / "run" / "run.json").write_text("")
        with hold_places(_places(tmp_path, run="first", goes_on=True)) as notes:
            assert notes == []
        assert _tree(tmp_path / "run") == LEFT | {"notes.txt"}
        assert json.loads((tmp_path / "run" / "run.json").read_text())["run"] == "first"


def test_another_runs_checkpoints_may_be_read_from_a_fresh_folder(tmp_path):
    _leave_a_run(tmp_path / "first")
    with hold_places(_places(tmp_path, reads=(("--load", tmp_path / "first" / "checkpoints"),))) as notes:
        assert notes == []
    assert _tree(tmp_path / "first") == LEFT | {"notes.txt"}


def _other_checkpoints(tmp_path: Path) -> Places:
    (tmp_path / "saved" / "iter_0000004").mkdir(parents=True)
    return _places(tmp_path, save=tmp_path / "saved")


def _other_tracker(tmp_path: Path) -> Places:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("4")
    return _places(tmp_path, save=tmp_path / "saved")


def _other_events(tmp_path: Path) -> Places:
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.1.host").write_text("")
    return _places(tmp_path, tensorboard_dir=tmp_path / "board")


def _reads_the_export(tmp_path: Path) -> Places:
    _leave_a_run(tmp_path / "run")
    return _places(tmp_path, reads=(("--hf-model", tmp_path / "run" / "hf"),))


def _reads_the_checkpoints_through_a_link(tmp_path: Path) -> Places:
    _leave_a_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    return _places(tmp_path, reads=(("--load", tmp_path / "link"),))


def _saves_to_the_run_dir_of_another(tmp_path: Path) -> Places:
    (tmp_path / "run" / "iter_0000004").mkdir(parents=True)
    return _places(tmp_path, save=tmp_path / "run")


def _below_a_file(tmp_path: Path) -> Places:
    (tmp_path / "file").write_text("")
    return _places(tmp_path, run_dir=tmp_path / "file" / "run")


REFUSALS = {
    _other_checkpoints: "--save SAVED: holds another run's checkpoints",
    _other_tracker: "--save SAVED: holds another run's checkpoints",
    _other_events: "--tensorboard-dir BOARD: holds another run's events",
    _reads_the_export: "--hf-model RUN/hf is of it",
    _reads_the_checkpoints_through_a_link: "--load LINK is of it",
    _saves_to_the_run_dir_of_another: "--save RUN: holds another run's checkpoints",
    _below_a_file: "cannot be written",
}


@pytest.mark.parametrize("prepare", REFUSALS, ids=lambda prepare: prepare.__name__.strip("_"))
def test_what_cannot_be_kept_apart_is_refused_and_nothing_moves(tmp_path, prepare):
    places = prepare(tmp_path)
    before = _tree(tmp_path)
    with pytest.raises(OutputError) as caught:
        check_places(places)
    message = str(caught.value)
    expected = REFUSALS[prepare]
    for name in ("saved", "board", "run", "link"):
        expected = expected.replace(name.upper(), str(tmp_path / name))
    assert expected in message and "\n" not in message
    assert _tree(tmp_path) == before


def test_folders_elsewhere_are_held_and_kept_by_the_run_that_goes_on(tmp_path):
    there = {"save": tmp_path / "saved", "tensorboard_dir": tmp_path / "board"}
    with hold_places(_places(tmp_path, **there)):
        (tmp_path / "saved" / "iter_0000002").mkdir()
        (tmp_path / "board" / "events.out.tfevents.1.host").write_text("")
        with pytest.raises(OutputError, match="--save .*saved: a run is going on in it"):
            check_places(_places(tmp_path, run="third", run_dir=tmp_path / "other", save=tmp_path / "saved"))
    with hold_places(_places(tmp_path, goes_on=True, **there)) as notes:
        assert notes == []
    with pytest.raises(OutputError, match="another run's events"):
        check_places(_places(tmp_path, run="third", tensorboard_dir=tmp_path / "board"))


def test_a_folder_is_one_runs_for_as_long_as_it_lasts_and_no_longer(tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(OutputError, match="a run is going on in it"):
            check_places(_places(tmp_path))
        first.kill()
    with hold_places(_places(tmp_path)) as notes:
        assert len(notes) == 1 and "an earlier run's files" in notes[0]


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold_places(_places(tmp_path)) as notes:
        assert notes == [
            f"{tmp_path / 'run'} cannot be locked (Function not implemented): another run in it at the same time would "
            "not be noticed"
        ]


def test_a_folder_that_cannot_be_moved_is_refused_in_one_line(tmp_path, monkeypatch):
    _leave_a_run(tmp_path / "run")

    def refuse(self: Path, target: Path) -> None:
        raise OSError(18, os.strerror(18))

    monkeypatch.setattr(Path, "rename", refuse)
    with (
        pytest.raises(OutputError, match="cannot be set aside .*name another --run-dir"),
        hold_places(_places(tmp_path)),
    ):
        pass
