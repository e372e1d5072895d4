"""The figures as a table in the terminal, as Markdown and as JSON, and the plot beside them."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loss_benchmark.machine import describe
from loss_benchmark.measure import Errors
from loss_benchmark.plot import draw
from loss_benchmark.run import FLOOR, Outcome, Record, Setting
from megatron.rl.errors import OutputError

_NONE = "–"
_MIB = 1 << 20
_LEAST_WIDTH = 120  # columns, where the output is no terminal

_DESCRIPTION = ["path", "function", "version", "GEMM work, NHV", "keeps the logits", "remarks"]
_KEY = """\
- floor: the three matrix products alone, into outputs that exist. Its errors are those of the exact gradients rounded
  to {dtype}.
- x floor, x ours: ratios of medians. Only ratios within one run mean anything.
- MiB: peak beyond inputs, outputs and the two gradients. B/(tok V): the same in bytes, for each token and vocabulary
  entry. B/(chunk tok V): for each token of a chunk and vocabulary entry, at the largest number of tokens.
- err: against float64{error_size}. The gradients' is the norm of the difference over the norm, the log-probabilities'
  the largest difference in nats.
- NHV: tokens x hidden x vocabulary, in operations of a matrix product.
- Peers run with their own chunk sizes, and without entropy where they can leave it out."""

_Cells = list[list[str]]  # the first row is the header


def print_table(setting: Setting, outcome: Outcome) -> None:
    """Prints times, errors and memory; below, what is missing or failed."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, _LEAST_WIDTH))
    console.print(Text(_title(setting)))
    for header, *rows in (_time_table(setting, outcome), _memory_table(setting, outcome)):
        table = Table()
        for column in header:
            table.add_column(column, justify="left" if column == "path" else "right", no_wrap=column == "path")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    for record in outcome.records:
        if record.reason:
            console.print(Text(f"{record.path.name}: {record.status}: {record.reason}"))


def write_report(setting: Setting, outcome: Outcome, folder: Path) -> list[Path]:
    """Writes ``benchmark_loss`` as .md, .json and .png; returns the files. Raises OutputError where it cannot."""
    facts = describe(setting.device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        markdown, raw = folder / "benchmark_loss.md", folder / "benchmark_loss.json"
        markdown.write_text(_markdown(setting, outcome, facts), encoding="utf-8")
        raw.write_text(json.dumps(_raw(setting, outcome, facts), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written ({error.strerror or error}); choose another folder") from error
    return [markdown, raw, draw(setting, outcome, folder / "benchmark_loss.png")]


def _title(setting: Setting) -> str:
    return (
        f"policy loss, forward and backward: {setting.tokens:,} tokens, hidden {setting.hidden:,}, "
        f"vocabulary {setting.vocab:,}, {setting.dtype_name}, {setting.device.type}"
    )


def _time_table(setting: Setting, outcome: Outcome) -> _Cells:
    """Times and errors: header, the floor, then each path."""
    header = ["path", "median ms", "least ms", "x floor", "x ours", "err dhidden", "err dweight", "err logp"]
    floor, own = outcome.floor, outcome.records[0].median
    rows = [[FLOOR, *_times(outcome.floor_seconds, floor, own), *_errors(outcome.rounding)]]
    for record in outcome.records:
        times = _times(record.seconds, floor, own)
        if record.status != "measured":
            times[0] = record.status
        rows.append([record.path.name, *times, *_errors(record.errors)])
    return [header, *rows]


def _memory_table(setting: Setting, outcome: Outcome) -> _Cells:
    """Memory: header, then each path."""
    sizes = setting.memory_tokens
    header = ["path", *(f"MiB at {tokens:,}" for tokens in sizes), *(f"B/(tok V) at {tokens:,}" for tokens in sizes)]
    rows = []
    for record in outcome.records:
        extra, chunk = record.extra_bytes, record.largest_chunk
        cells = [f"{extra[tokens] / _MIB:,.1f}" if tokens in extra else _NONE for tokens in sizes]
        cells += [f"{extra[tokens] / (tokens * setting.vocab):.2f}" if tokens in extra else _NONE for tokens in sizes]
        largest = max(chunk, default=0)
        cells.append(f"{extra[largest] / (chunk[largest] * setting.vocab):.2f}" if chunk else _NONE)
        rows.append([record.path.name, *cells])
    return [[*header, "B/(chunk tok V)"], *rows]


def _errors(errors: Errors | None) -> list[str]:
    values = (errors.grad_hidden, errors.grad_weight, errors.logprob) if errors else (None, None, None)
    return [_NONE if value is None else f"{value:.1e}" for value in values]


def _times(seconds: list[float], floor: float, own: float | None) -> list[str]:
    """Median and least in milliseconds, and the median as a multiple of the floor and of ours."""
    if not seconds:
        return [_NONE] * 4
    median = statistics.median(seconds)
    versus = _NONE if own is None else f"{median / own:.2f}"
    return [f"{median * 1000:,.1f}", f"{min(seconds) * 1000:,.1f}", f"{median / floor:.2f}", versus]


def _markdown(setting: Setting, outcome: Outcome, facts: dict[str, str]) -> str:
    error_size = "" if setting.error_vocab == setting.vocab else f" with a vocabulary of {setting.error_vocab:,}"
    told = [f"- {record.path.name}: {record.status}: {record.reason}" for record in outcome.records if record.reason]
    title = _title(setting)
    parts = [
        f"# {title[0].upper()}{title[1:]}",
        f"{setting.rounds} rounds in alternation after a warm-up, seed {setting.seed}. "
        + "; ".join(f"{name}: {value}" for name, value in facts.items()),
        _markdown_table(_time_table(setting, outcome)),
        _markdown_table(_memory_table(setting, outcome)),
        "\n".join(told) or "Every path ran.",
        _KEY.format(dtype=setting.dtype_name, error_size=error_size),
        _markdown_table([_DESCRIPTION, *(_description(record) for record in outcome.records)]),
    ]
    return "\n\n".join(parts) + "\n"


def _description(record: Record) -> list[str]:
    path = record.path
    keeps = "yes" if path.keeps_logits else "no"
    return [path.name, f"`{path.function}`", path.version or _NONE, str(path.gemm_work), keeps, path.note]


def _markdown_table(cells: _Cells) -> str:
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _raw(setting: Setting, outcome: Outcome, facts: dict[str, str]) -> dict[str, Any]:
    shown = dataclasses.asdict(setting) | {"dtype": setting.dtype_name, "device": setting.device.type}
    return {
        "machine": facts,
        "setting": shown,
        "floor": {"seconds": outcome.floor_seconds, "rounding": dataclasses.asdict(outcome.rounding)},
        "paths": [_raw_record(record) for record in outcome.records],
    }


def _raw_record(record: Record) -> dict[str, Any]:
    path = record.path
    return {
        "name": path.name,
        "function": path.function,
        "version": path.version,
        "keeps_logits": path.keeps_logits,
        "gemm_work_nhv": path.gemm_work,
        "note": path.note,
        "status": record.status,
        "reason": record.reason,
        "seconds": record.seconds,
        "extra_bytes": record.extra_bytes,
        "largest_chunk": record.largest_chunk,
        "errors": dataclasses.asdict(record.errors) if record.errors else None,
    }
