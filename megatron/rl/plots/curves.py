"""The curves of a run over its steps: one figure with all of them, and one figure each."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from megatron.rl.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, add_legend, dress, new_figure, save
from megatron.rl.run_log import METRICS, PHASES, Record

_FEW, _MANY = 40, 24  # points up to which markers are drawn; from which a moving mean is
_PHASE_COLORS = dict(zip(PHASES, (BLUE, ORANGE, PURPLE, GREEN, "#5fb3c4", INK, "#c9a227"), strict=True))


class Table:
    """The records of a run by column."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self.last_step = max(records[-1]["step"], 1)  # of all panels' axes

    def has(self, name: str) -> bool:
        """Whether any record has a finite number of that name."""
        return len(self.column(name)[0]) > 0

    def not_finite(self) -> dict[str, int]:
        """How many numbers of each metric cannot be drawn."""
        counts = Counter(name for r in self._records for name, value in r.items() if not np.isfinite(value))
        return dict(sorted(counts.items()))

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, where it is recorded and finite."""
        pairs = [(r["step"], r[name]) for r in self._records if name in r and np.isfinite(r[name])]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(steps, dtype=float), np.array(values, dtype=float)


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    name: str  # of its own file
    title: str
    unit: str
    needs: tuple[str, ...]  # metrics, any of which makes it worth drawing
    draw: Callable[[Axes, Table], None]

    def render(self, axes: Axes, table: Table) -> None:
        """Draws the panel, or says that there is nothing to draw."""
        dress(axes, self.title, "step", self.unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if not self.can_draw(table):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color=GREY)
            return
        self.draw(axes, table)
        margin = max(0.04 * table.last_step, 0.5)  # room for a step's bar
        axes.set_xlim(-margin, table.last_step + margin)
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            add_legend(axes)

    def can_draw(self, table: Table) -> bool:
        """Whether the run recorded anything of it."""
        return any(table.has(name) for name in self.needs)


def _line(
    axes: Axes, table: Table, name: str, color: str, label: str | None = None, smooth: bool = False, width: float = 1.6
) -> None:
    """One metric; noisy ones as a pale line under their moving mean."""
    steps, values = table.column(name)
    if not len(steps):
        return
    marker = "." if len(steps) <= _FEW else ""
    if not smooth or len(steps) < _MANY:
        axes.plot(steps, values, color=color, linewidth=width, marker=marker, markersize=5, label=label)
        return
    axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
    window = max(3, len(steps) // 15) | 1
    padded = np.pad(values, window // 2, mode="edge")
    mean = np.convolve(padded, np.full(window, 1 / window), mode="valid")
    prefix = f"{label}, " if label else ""
    axes.plot(steps, mean, color=color, linewidth=1.8, label=f"{prefix}mean of {window} steps")


def _log_scale(axes: Axes, table: Table, names: Sequence[str]) -> None:
    """A logarithmic axis; where there are zeros, one that is linear below the smallest positive value."""
    values = np.concatenate([table.column(name)[1] for name in names])
    positive = values[values > 0]
    if not len(positive):
        return
    if (values <= 0).any():
        axes.set_yscale("symlog", linthresh=positive.min())
    else:
        axes.set_yscale("log")


def _legend_above(axes: Axes, ncols: int) -> None:
    """A legend in room made for it over the data, where those fill the axes."""
    scale = axes.yaxis.get_transform()
    low, high = scale.transform(np.array(axes.get_ylim()))
    axes.set_ylim(top=float(scale.inverted().transform(np.array([high + 0.28 * (high - low)]))[0]))
    add_legend(axes, ncols=ncols, loc="upper left")


def _plain_ticks(axes: Axes) -> None:
    axes.ticklabel_format(axis="y", useOffset=False)


def _reward(axes: Axes, table: Table) -> None:
    _line(axes, table, "reward/mean", BLUE, "training", smooth=True)
    steps, values = table.column("eval/reward")
    axes.plot(steps, values, color=ORANGE, linewidth=1.8, marker="o", markersize=4.5, label="evaluation")
    if table.has("eval/pass_at_k"):
        steps, values = table.column("eval/pass_at_k")
        axes.plot(steps, values, color=ORANGE, linewidth=1.0, linestyle="--", label="evaluation, pass@k")


def _length(axes: Axes, table: Table) -> None:
    _line(axes, table, "response/length", BLUE, "training", smooth=True)
    steps, values = table.column("eval/response_length")
    if len(steps):
        axes.plot(steps, values, color=ORANGE, linewidth=1.6, marker="o", markersize=4.5, label="evaluation")


def _single(name: str, *, smooth: bool = True, log: bool = False) -> Callable[[Axes, Table], None]:
    def draw(axes: Axes, table: Table) -> None:
        _line(axes, table, name, BLUE, smooth=smooth)
        if log:
            _log_scale(axes, table, [name])
        else:
            _plain_ticks(axes)

    return draw


def _tv(axes: Axes, table: Table) -> None:
    lines = {
        "tv/max": (RED, "largest"),
        "tv/p99": (ORANGE, "99th percentile"),
        "tv/p90": (GREEN, "90th percentile"),
        "tv/p50": (PURPLE, "median"),
    }
    for name, (color, label) in lines.items():
        _line(axes, table, name, color, label, width=1.1)
    _line(axes, table, "tv/mean", INK, "mean")
    _log_scale(axes, table, ["tv/mean", *lines])
    _legend_above(axes, ncols=3)


def _band(axes: Axes, table: Table, quantity: str, color: str) -> None:
    steps, least = table.column(f"{quantity}/min")
    steps_most, most = table.column(f"{quantity}/max")
    shared, at_least, at_most = np.intersect1d(steps, steps_most, return_indices=True)
    if len(shared) == 1:  # an area needs two points
        axes.vlines(shared, least[at_least], most[at_most], color=color, alpha=0.2, linewidth=12, label="min to max")
    else:
        axes.fill_between(
            shared, least[at_least], most[at_most], color=color, alpha=0.2, linewidth=0, label="min to max"
        )
    _line(axes, table, f"{quantity}/mean", color, "mean")


def _ratio(axes: Axes, table: Table) -> None:
    _band(axes, table, "ratio", BLUE)
    axes.axhline(1, color=GREY, linewidth=0.9, linestyle=":")
    names = ["ratio/min", "ratio/max", "ratio/mean"]
    values = np.concatenate([table.column(name)[1] for name in names])
    if 0 < values.min() < values.max() / 3:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        _plain_ticks(axes)
    _legend_above(axes, ncols=2)


def _weight(axes: Axes, table: Table) -> None:
    _band(axes, table, "weight", GREEN)
    axes.axhline(1, color=GREY, linewidth=0.9, linestyle=":")
    _, least = table.column("weight/min")
    if len(least) and least.min() < 0.2:
        axes.axhline(0, color=RED, linewidth=0.9, linestyle="--", label="reversed below")
    _plain_ticks(axes)
    _legend_above(axes, ncols=3)


def _negative(axes: Axes, table: Table) -> None:
    _line(axes, table, "weight/negative_share", RED)
    _, values = table.column("weight/negative_share")
    top = max(1.1 * values.max(), 0.01)
    axes.set_ylim(-0.02 * top, top)  # a line at zero stays visible
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _mismatch(axes: Axes, table: Table) -> None:
    lines = {
        "mismatch/logprob": (BLUE, "|log π − log μ|, nat"),
        "mismatch/tv": (GREEN, "|π − μ|"),
        "mismatch/k3": (PURPLE, "k3 estimate of KL(μ, π), nat"),
    }
    for name, (color, label) in lines.items():
        _line(axes, table, name, color, label)
    _log_scale(axes, table, list(lines))
    _legend_above(axes, ncols=1)


def _time(axes: Axes, table: Table) -> None:
    """The phases of a step on top of each other; evaluations, which come between steps, as dots."""
    steps, total = table.column("time/step")
    base = np.zeros_like(total)
    for phase in PHASES:
        own, values = table.column(f"time/{phase}")
        if phase == "eval" or not len(own):
            continue
        seconds = np.zeros_like(total)
        _, there, here = np.intersect1d(steps, own, return_indices=True)
        seconds[there] = values[here]
        _stack(axes, steps, base, seconds, color=_PHASE_COLORS[phase], alpha=0.85, label=phase)
        base = base + seconds
    if len(steps):
        _stack(axes, steps, base, np.maximum(total - base, 0), color="#d4d7dc", label="other")
    own, values = table.column("time/eval")
    if len(own):
        axes.plot(own, values, ".", color=_PHASE_COLORS["eval"], markersize=6, label="evaluation")
    axes.set_ylim(bottom=0)
    _legend_above(axes, ncols=4)


def _stack(axes: Axes, steps: np.ndarray, base: np.ndarray, height: np.ndarray, **look: Any) -> None:
    if len(steps) <= _FEW:
        axes.bar(steps, height, bottom=base, width=0.8, **look)
    else:
        axes.fill_between(steps, base, base + height, linewidth=0, **look)


def _speed(axes: Axes, table: Table) -> None:
    _line(axes, table, "speed/tokens_per_second", BLUE, smooth=True)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


PANELS = (
    Panel("reward", "Reward", "score", ("reward/mean", "eval/reward"), _reward),
    Panel("response_length", "Response length", "tokens", ("response/length",), _length),
    Panel("entropy", "Entropy of the policy", "nat", ("policy/entropy",), _single("policy/entropy")),
    Panel("loss", "Loss", "objective", ("train/loss",), _single("train/loss")),
    Panel("grad_norm", "Gradient norm before clipping", "L2 norm", ("train/grad_norm",), _single("train/grad_norm")),
    Panel("tv", "Probability shift |π − μ|", "probability", ("tv/mean",), _tv),
    Panel("ratio", "Importance ratio π / μ", "ratio", ("ratio/mean",), _ratio),
    Panel("weight", "Gradient weight w", "weight", ("weight/mean",), _weight),
    Panel("negative_weight", "Tokens with w < 0", "share", ("weight/negative_share",), _negative),
    Panel(
        "mismatch",
        "Engine against trainer, before updates",
        "mean over tokens",
        ("mismatch/logprob", "mismatch/tv", "mismatch/k3"),
        _mismatch,
    ),
    Panel("time", "Time by phase", "s", tuple(f"time/{phase}" for phase in PHASES), _time),
    Panel("speed", "Sampled tokens per second", "tokens/s", ("speed/tokens_per_second",), _speed),
)
assert all(name in METRICS for panel in PANELS for name in panel.needs)


def plot_curves(records: Sequence[Record], out_dir: Path, title: str) -> tuple[list[Path], list[str]]:
    """Draws ``curves.png`` with all panels, and each panel that has data as ``<name>.png``.

    Args:
        records: as :func:`megatron.rl.run_log.read_metrics` gives them.
        title: of the overview; what was recorded is added to it.

    Returns the files written, and one line for everything that could not be drawn.
    """
    table = Table(records)
    overview = new_figure(15, 14)
    overview.suptitle(f"{title}\n{_summary(records)}", fontsize=12, color=INK)
    for axes, panel in zip(overview.subplots(4, 3).flat, PANELS, strict=True):
        panel.render(axes, table)
    written = [save(overview, out_dir / "curves.png")]
    drawable = [panel for panel in PANELS if panel.can_draw(table)]
    for panel in drawable:
        figure = new_figure(7, 4.2)
        panel.render(figure.subplots(), table)
        written.append(save(figure, out_dir / f"{panel.name}.png"))
    empty = [panel.name for panel in PANELS if panel not in drawable]
    left_out = [f"{name}.png is left out: the run recorded nothing of it" for name in empty]
    left_out += [f"{name}: values not finite, not drawn: {count}" for name, count in table.not_finite().items()]
    return written, left_out


def _summary(records: Sequence[Record]) -> str:
    """Such as ``40 steps, evaluation reward 0.33 to 0.71``."""
    steps = int(records[-1]["step"])
    text = f"{steps} step{'s' if steps != 1 else ''}"
    rewards = Table(records).column("eval/reward")[1]
    return f"{text}, evaluation reward {rewards[0]:.2f} to {rewards[-1]:.2f}" if len(rewards) > 1 else text
