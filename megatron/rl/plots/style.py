"""How every figure looks, and how it is written. No global state of matplotlib is touched."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.rl.errors import OutputError

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2667a8", "#dd7a1e", "#2f8f5b", "#c23b3b", "#7b5ea7", "#8a8f98"
INK = "#2b2f36"
DPI = 120


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches that only ever draws to a file."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, title: str, xlabel: str, ylabel: str) -> None:
    """Title, labels with units, a quiet grid, two spines."""
    axes.set_title(title, fontsize=10.5, color=INK, loc="left", fontweight="bold")
    axes.set_xlabel(xlabel, fontsize=9, color=INK)
    axes.set_ylabel(ylabel, fontsize=9, color=INK)
    axes.tick_params(labelsize=8.5, colors=INK, length=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(visible=True, color="#e4e6ea", linewidth=0.7)
    axes.set_axisbelow(True)


def add_legend(axes: Axes, **where: Any) -> None:
    """A legend that stays readable where it lies on data. ``where`` goes to matplotlib."""
    axes.legend(
        fontsize=8, labelcolor=INK, handlelength=1.4, edgecolor="none", facecolor="white", framealpha=0.8, **where
    )


def save(figure: Figure, path: Path) -> Path:
    """Writes a PNG. Raises :class:`OutputError` where it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror or error}); choose another folder") from error
    return path
