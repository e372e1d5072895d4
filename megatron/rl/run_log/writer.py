"""The record of a run: one line a step in ``metrics.jsonl``, the same in TensorBoard, and an echo to a display."""

import os
import time
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.rl.run_log.files import METRICS_FILE, Record, read_records, to_json, writing
from megatron.rl.run_log.names import METRICS

_NOT_DRAWN = ("step", "wall_time")


class RunLog:
    """Writes a run's records on rank 0; on other ranks every call does nothing.

    Use as a context manager, or call :meth:`close`. Every record is on the disk when :meth:`write` returns.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        rank: int,
        tensorboard_dir: str | Path | None = None,
        resume_step: int | None = None,
        echo: Callable[[Record], None] | None = None,
    ) -> None:
        """Opens the files.

        Args:
            run_dir: made where it is missing.
            rank: global rank of this process.
            tensorboard_dir: None for no TensorBoard.
            resume_step: the last step of the checkpoint that is resumed: later lines of an earlier life are dropped.
                None for a new run, whose folder has no ``metrics.jsonl`` yet.
            echo: is given every record after it is written, such as ``ProgressDisplay.show``.

        Raises :class:`megatron.rl.errors.OutputError` where the folder cannot be written.
        """
        self._file: FileIO | None = None
        self._board: Any = None
        self._echo = echo
        self._writes = rank == 0
        if not self._writes:
            return
        self._path = Path(run_dir) / METRICS_FILE
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is not None and self._path.is_file():
                self._drop_after(resume_step)
            # Unbuffered: what a full disk refused must not come up again when the file is closed.
            self._file = self._path.open("xb" if resume_step is None else "ab", buffering=0)
        if tensorboard_dir is not None:
            with writing(Path(tensorboard_dir)):
                self._board = _open_board(Path(tensorboard_dir), resume_step)

    def write(self, record: Mapping[str, float]) -> None:
        """Records one step, or one evaluation under its step's number. ``wall_time`` is added here.

        Raises:
            ValueError: a closed log, no ``step``, or a name that is not in :data:`megatron.rl.run_log.METRICS`.
            OutputError: the disk is full, or gone; also where TensorBoard's files are.
        """
        if not self._writes:
            return
        if self._file is None:
            raise ValueError("the run's log is closed")
        if "step" not in record:
            raise ValueError("a record needs its step")
        if unknown := sorted(record.keys() - METRICS.keys()):
            raise ValueError(f"metrics without an entry in METRICS: {', '.join(unknown)}")
        complete = {**record, "wall_time": time.time()}
        with writing(self._path):
            rest = (to_json(complete) + "\n").encode()
            while rest:  # a nearly full disk takes a part, then refuses
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        self._draw(complete)
        if self._echo is not None:
            self._echo(complete)

    def close(self) -> None:
        """Closes the files. Safe to call twice. Raises :class:`OutputError` where the last bytes cannot be written."""
        file, board, self._file, self._board = self._file, self._board, None, None
        if file is not None:
            with writing(self._path):
                file.close()
        if board is not None:
            with writing(Path(board.log_dir)):
                board.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draw(self, record: Record) -> None:
        if self._board is None:
            return
        with writing(Path(self._board.log_dir)):
            for name, value in record.items():
                if name not in _NOT_DRAWN:
                    self._board.add_scalar(name, value, global_step=int(record["step"]), walltime=record["wall_time"])
            self._board.flush()

    def _drop_after(self, resume_step: int) -> None:
        """Cuts off the records behind the step that is resumed."""
        kept = [to_json(record) + "\n" for record in read_records(self._path) if record["step"] <= resume_step]
        replacement = self._path.with_suffix(".part")
        replacement.write_text("".join(kept), encoding="utf-8")
        replacement.replace(self._path)


def _open_board(folder: Path, resume_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard then hides what an earlier life wrote from that step on.
    return SummaryWriter(str(folder), purge_step=0 if resume_step is None else resume_step + 1)
