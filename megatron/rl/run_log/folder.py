"""A run folder holds one run: an earlier one in it is set aside; folders elsewhere with another's files are refused.

Which run a folder is of stands in its ``run.json``. The file is locked for as long as the run lasts.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.errors import OutputError
from megatron.rl.run_log.files import (
    CHECKPOINTS_FOLDER,
    EXPORT_FOLDER,
    METRICS_FILE,
    PLOTS_FOLDER,
    TENSORBOARD_FOLDER,
    TOKENS_FILE,
    writing,
)

RUN_FILE = "run.json"
# What a run leaves in its folder. The file that says whose it is comes last: what was set aside in part goes on so.
_OUTPUTS = (
    *(METRICS_FILE, TOKENS_FILE, "metrics.part", "tokens.part"),
    *(TENSORBOARD_FOLDER, PLOTS_FOLDER, CHECKPOINTS_FOLDER),
    *(EXPORT_FOLDER, f".{EXPORT_FOLDER}.partial", f".{EXPORT_FOLDER}.old"),
    RUN_FILE,
)


@dataclass(frozen=True)
class Places:
    """Where a run writes, and what it must not move out of its own way.

    Args:
        run: the run's name, unlike any other's.
        run_dir: ``--run-dir``.
        save: ``--save``, in the run folder or elsewhere.
        tensorboard_dir: likewise.
        goes_on: the run goes on from the checkpoints in ``save``, and keeps the name of the run that wrote them.
        reads: flags with the files and folders that the run reads.
    """

    run: str
    run_dir: Path
    save: Path
    tensorboard_dir: Path
    goes_on: bool
    reads: tuple[tuple[str, Path], ...]

    @property
    def elsewhere(self) -> list[tuple[str, Path]]:
        """Folders that the run writes to outside its own, by flag."""
        own = {self.run_dir, self.run_dir / CHECKPOINTS_FOLDER, self.run_dir / TENSORBOARD_FOLDER}
        return [
            (flag, folder)
            for flag, folder in (("--save", self.save), ("--tensorboard-dir", self.tensorboard_dir))
            if folder.resolve() not in {path.resolve() for path in own}
        ]


def check_places(places: Places) -> None:
    """Refuses, before anything is moved or written, what :func:`hold_places` could not put right.

    Raises :class:`OutputError` where a run is going on in one of the folders, where a folder elsewhere holds another
    run's files, or where the run reads from what it would have to set aside.
    """
    for flag, folder in (("--run-dir", places.run_dir), *places.elsewhere):
        path = folder / RUN_FILE
        with writing(path), contextlib.suppress(FileNotFoundError), path.open("r+") as file:
            _lock(file.fileno(), flag, folder)
    if not places.goes_on and _has_checkpoints(places.save) and _stays(places, places.save):
        raise OutputError(
            f"--save {places.save}: holds another run's checkpoints; go on from them by --load, or name another folder"
        )
    board = places.tensorboard_dir
    if _stays(places, board) and any(board.glob("events.out.tfevents.*")) and _run_of(board) != places.run:
        raise OutputError(f"--tensorboard-dir {board}: holds another run's events; name another folder")
    if not _is_used_by_another(places):
        return
    for flag, path in places.reads:
        for name in _OUTPUTS:
            if (places.run_dir / name).resolve() in (path.resolve(), *path.resolve().parents):
                raise OutputError(
                    f"--run-dir {places.run_dir}: holds an earlier run, and {flag} {path} is of it, which a new run "
                    "there would set aside; name another --run-dir"
                )


@contextlib.contextmanager
def hold_places(places: Places) -> Iterator[list[str]]:
    """Makes the folders this run's and holds them; yields one line for each thing that was done to them.

    An earlier run's files in ``run_dir`` move to a folder beside it, named after the time when that run began.
    Raises :class:`OutputError` as :func:`check_places` does, and where a folder cannot be written.
    """
    check_places(places)
    notes = []
    with contextlib.ExitStack() as held:
        if _is_used_by_another(places):
            target = _set_aside(places.run_dir)
            notes.append(f"an earlier run's files in {places.run_dir} are now in {target}")
        for flag, folder in (("--run-dir", places.run_dir), *places.elsewhere):
            if note := held.enter_context(_held(flag, folder, places.run)):
                notes.append(note)
        yield notes


def _stays(places: Places, folder: Path) -> bool:
    """Whether what is in a folder would stay there: it is not among what is set aside."""
    moved = (places.run_dir / CHECKPOINTS_FOLDER, places.run_dir / TENSORBOARD_FOLDER)
    return folder.resolve() not in {path.resolve() for path in moved}


def _has_checkpoints(folder: Path) -> bool:
    return any(folder.glob("iter_*")) or any(folder.glob("latest_checkpointed_iteration.txt"))


def _is_used_by_another(places: Places) -> bool:
    if not any((places.run_dir / name).exists() for name in _OUTPUTS):
        return False
    owner = _run_of(places.run_dir)
    if owner is None and places.goes_on:  # killed before it wrote its name: its checkpoints tell whose the folder is
        return _stays(places, places.save)
    return owner != places.run


def _record(folder: Path) -> dict:
    """What ``run.json`` says; nothing where there is none, or where a run was killed while it wrote it."""
    try:
        found = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _run_of(folder: Path) -> str | None:
    return _record(folder).get("run")


def _set_aside(run_dir: Path) -> Path:
    """Moves an earlier run's files; where that was cut off before, it goes on. Other files stay where they are."""
    source = run_dir.resolve()
    present = [source / name for name in _OUTPUTS if (source / name).exists()]
    began = _record(source).get("began") or min(path.stat().st_mtime for path in present)
    stem = f"{source.name}.{time.strftime('%Y-%m-%dT%H-%M-%S', time.localtime(began))}"
    target, number = source.with_name(stem), 1
    while (target / RUN_FILE).exists():
        number += 1
        target = source.with_name(f"{stem}.{number}")
    try:
        target.mkdir(exist_ok=True)
        for path in present:
            path.rename(target / path.name)
    except OSError as error:
        raise OutputError(
            f"--run-dir {run_dir}: the earlier run in it cannot be set aside ({error.strerror or error}); name another "
            "--run-dir"
        ) from error
    return target


@contextlib.contextmanager
def _held(flag: str, folder: Path, run: str) -> Iterator[str | None]:
    """Writes the run's name into a folder and keeps the file locked. Yields a line where it cannot be locked."""
    path = folder / RUN_FILE
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        note = _lock(descriptor, flag, folder)
        if _run_of(folder) != run:
            with writing(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, (json.dumps({"run": run, "began": time.time()}) + "\n").encode(), 0)
        yield note
    finally:
        os.close(descriptor)  # and with it the lock


def _lock(descriptor: int, flag: str, folder: Path) -> str | None:
    """Locks a ``run.json``. A killed run's lock ends with it. Returns a line where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"{flag} {folder}: a run is going on in it; wait for its end, or name another folder"
        ) from None
    except OSError as error:
        return f"{folder} cannot be locked ({error.strerror}): another run in it at the same time would not be noticed"
    return None
