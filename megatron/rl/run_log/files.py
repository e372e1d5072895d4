"""Where a run folder keeps what, and how numbers become JSON."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.rl.errors import OutputError

METRICS_FILE = "metrics.jsonl"
TOKENS_FILE = "tokens.npz"
TENSORBOARD_FOLDER = "tensorboard"
PLOTS_FOLDER = "plots"
CHECKPOINTS_FOLDER = "checkpoints"
EXPORT_FOLDER = "hf"

Record = dict[str, float]
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(record: Record) -> str:
    """One line of valid JSON; a number that is not finite becomes a string, since JSON has none."""
    return json.dumps({name: _encode(value) for name, value in record.items()}, allow_nan=False)


def _encode(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_json(line: str) -> Record:
    """What :func:`to_json` wrote. Raises ValueError for anything else."""
    values = json.loads(line)
    if not isinstance(values, dict) or "step" not in values:
        raise ValueError("no object with a step")
    return {name: _decode(name, value) for name, value in values.items()}


def _decode(name: str, value: Any) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is no number")
    return value


def read_records(path: Path) -> list[Record]:
    """The lines of a metrics file as they are.

    A last line without its line break is the trace of a run that was killed while it wrote: it is left out.
    Raises :class:`OutputError` that names the line for one that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path} cannot be read ({error}); give the folder of a run (--run-dir)") from error
    complete, _, _ = text.rpartition("\n")
    records = []
    for number, line in enumerate(complete.splitlines(), start=1):
        try:
            records.append(from_json(line))
        except ValueError as error:
            raise OutputError(
                f"{path}, line {number}: not a metrics record ({error}); mend or remove the line"
            ) from error
    return records


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The records of a run folder, one a step in ascending order; lines of one step are merged, later values win.

    Raises :class:`OutputError` where there is no ``metrics.jsonl``, no record in it, or a line that is none.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        raise OutputError(f"{run_dir} has no {METRICS_FILE}; give the folder of a run (--run-dir)")
    steps: dict[float, Record] = {}
    for record in read_records(path):
        steps[record["step"]] = steps.get(record["step"], {}) | record
    if not steps:
        raise OutputError(f"{path} has no record yet; wait for the run's first step")
    return [steps[step] for step in sorted(steps)]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tells a failed write to ``path`` as an :class:`OutputError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{path} cannot be written ({reason}); free the disk or choose another --run-dir") from error
