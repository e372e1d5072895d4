"""The plot: time against memory, and memory against the number of tokens."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loss_benchmark.run import Outcome, Record, Setting
from megatron.rl.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, dress, new_figure, save

_OWN_COLORS = (BLUE, "#6ba3d6")
_COLORS = (ORANGE, GREEN, RED, PURPLE, GREY)
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_MIB = 1 << 20


def draw(setting: Setting, outcome: Outcome, path: Path) -> Path:
    """Writes the figure. Paths without figures are left out of it. Raises OutputError where it cannot be written."""
    figure = new_figure(12.5, 5.2)
    size = f"{setting.tokens:,} tokens, hidden {setting.hidden:,}, vocabulary {setting.vocab:,}"
    figure.suptitle(f"Policy loss, forward and backward: {size}, {setting.dtype_name}", fontsize=12, color=INK)
    time, memory = figure.subplots(1, 2)
    largest = setting.memory_tokens[-1]
    dress(time, "Time and memory: lower left is better", f"extra memory at {largest:,} tokens, MiB", "time / floor")
    dress(memory, "Memory over tokens: flat is better", "tokens", "extra memory, MiB")
    for place, record in enumerate(outcome.records):
        _draw_path(time, memory, record, place, outcome.floor, largest)
    time.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    for axis in (time.xaxis, memory.xaxis, memory.yaxis):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axis.set_minor_formatter(NullFormatter())
    memory.set_xticks(setting.memory_tokens)
    time.set_ylim(bottom=0)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside right center",
        title="hollow: keeps all logits",
        title_fontsize=8.5,
        fontsize=8.5,
        labelcolor=INK,
        edgecolor="none",
    )
    return save(figure, path)


def _draw_path(time: Axes, memory: Axes, record: Record, place: int, floor: float, largest: int) -> None:
    own = place < len(_OWN_COLORS)
    color = _OWN_COLORS[place] if own else _COLORS[place % len(_COLORS)]
    look: dict[str, Any] = {
        "color": color,
        "marker": "*" if own else _MARKERS[place % len(_MARKERS)],
        "markersize": 14 if own else 8,
        "markerfacecolor": "white" if record.path.keeps_logits else color,
    }
    mib = {tokens: extra / _MIB for tokens, extra in record.extra_bytes.items()}
    if mib:
        memory.plot(list(mib), list(mib.values()), label=record.path.name, linewidth=1.4, **look)
    if record.median is not None and largest in mib:
        time.plot([mib[largest]], [record.median / floor], linestyle="none", **look)
