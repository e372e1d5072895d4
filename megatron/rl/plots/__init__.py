"""Figures of a run, from nothing but its folder."""

from dataclasses import dataclass
from pathlib import Path

from megatron.rl.plots.curves import plot_curves
from megatron.rl.plots.paper import gradient_weights, plot_gradient_weights, plot_token_probabilities
from megatron.rl.run_log import PLOTS_FOLDER, TOKENS_FILE, read_metrics, read_tokens

__all__ = [
    "PlotReport",
    "gradient_weights",
    "plot_curves",
    "plot_gradient_weights",
    "plot_run",
    "plot_token_probabilities",
]


@dataclass(frozen=True)
class PlotReport:
    """What :func:`plot_run` did."""

    written: tuple[Path, ...]
    left_out: tuple[str, ...]  # one line each: what was not drawn, and why


def plot_run(run_dir: str | Path, out_dir: str | Path | None = None) -> PlotReport:
    """Draws all figures of a run folder as PNG into ``out_dir``, by default ``plots`` in the folder.

    ``curves.png`` has all curves, and each has a file of its own; ``figure1_gradient_weights.png`` and
    ``figure2_token_probabilities.png`` are those of arXiv 2606.09821.

    Raises :class:`megatron.rl.errors.OutputError` for a folder without records or with damaged ones, and for an
    output folder that cannot be written.
    """
    folder = Path(run_dir)
    out = folder / PLOTS_FOLDER if out_dir is None else Path(out_dir)
    title = folder.resolve().name
    written, left_out = plot_curves(read_metrics(folder), out, title)
    written.append(plot_gradient_weights(out / "figure1_gradient_weights.png"))
    if (folder / TOKENS_FILE).is_file():
        written.append(plot_token_probabilities(read_tokens(folder), out / "figure2_token_probabilities.png", title))
    else:
        left_out.append(f"figure2_token_probabilities.png is left out: the run has no {TOKENS_FILE}")
    return PlotReport(tuple(written), tuple(left_out))
