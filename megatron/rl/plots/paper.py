"""Figures 1 and 2 of arXiv 2606.09821, the first from this project's own objectives, the second from a run's tokens."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.ticker import FuncFormatter, PercentFormatter

from megatron.rl.config import ObjectiveConfig
from megatron.rl.objectives import TokenObjective
from megatron.rl.plots.style import BLUE, INK, ORANGE, RED, add_legend, dress, new_figure, save
from megatron.rl.run_log import TokenSample

# The settings of figure 1.
_FIGURE_1 = (
    ("PPO / GRPO\nε = 0.2, 0.28", ObjectiveConfig("grpo", eps_low=0.2, eps_high=0.28)),
    ("SPO\nε = 1", ObjectiveConfig("spo", eps=1.0)),
    ("DPPO\nδ = 0.2", ObjectiveConfig("dppo", delta=0.2)),
    ("DRPO\nδ = 1", ObjectiveConfig("drpo", delta=1.0)),
)
_RARE = 0.01  # tokens up to this probability are the low tail of figure 2
_LEAST_SHIFT = 1e-8  # below float32's resolution of a probability: no shift that means anything


def gradient_weights(config: ObjectiveConfig, advantage: float, points: int = 400) -> np.ndarray:
    """w of dJ/dlogp = w r A on a grid over (mu, pi), [points, points]: rows are pi, columns mu, cell centres in (0, 1).

    Made from the derivative that training uses.
    """
    objective = TokenObjective(config)
    logs = torch.log((torch.arange(points, dtype=torch.float64) + 0.5) / points).float()
    logp, logmu = torch.meshgrid(logs, logs, indexing="ij")
    _, slope = objective(logp, logmu, torch.full_like(logp, advantage))
    weights = slope.double() / (torch.exp(logp.double() - logmu.double()) * advantage)
    return weights.numpy().round(5) + 0.0  # float32's noise would show as stripes; + 0.0 makes -0.0 positive


def plot_gradient_weights(path: Path) -> Path:
    """Figure 1: w over (mu, pi) for PPO/GRPO, SPO, DPPO and DRPO, for A > 0 and A < 0. Returns ``path``."""
    figure = new_figure(13, 6.4)
    grid = figure.subplots(2, len(_FIGURE_1), sharex=True, sharey=True)
    colors = LinearSegmentedColormap.from_list("weight", ["#8f1d1d", "#dd6b5b", "#ffffff", "#6ba3d6", "#123f73"])
    for row, (sign, advantage) in enumerate((("A > 0", 1.0), ("A < 0", -1.0))):
        for axes, (label, config) in zip(grid[row], _FIGURE_1, strict=True):
            weights = gradient_weights(config, advantage)
            image = axes.imshow(weights, origin="lower", extent=(0, 1, 0, 1), cmap=colors, norm=Normalize(-2, 2))
            if weights.min() < 0 < weights.max():
                _zero_line(axes, weights)
            axes.plot([0, 1], [0, 1], color=INK, linewidth=0.7, linestyle=":")
            _square(axes, label if row == 0 else "", f"{sign}\nπ(y | s)" if axes is grid[row][0] else "")
            axes.set_xlabel("μ(y | s)" if row == 1 else "", fontsize=10, color=INK)
            axes.text(0.03, 0.97, _range(weights), transform=axes.transAxes, va="top", fontsize=8, color=INK, bbox=_BOX)
    bar = figure.colorbar(image, ax=grid, extend="both", shrink=0.8, pad=0.015)
    meaning = "gradient weight w:  below 0 reversed,  0 no gradient,  1 plain policy gradient"
    bar.set_label(meaning, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8.5)
    return save(figure, path)


_BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}


def _zero_line(axes: Axes, weights: np.ndarray) -> None:
    centres = (np.arange(len(weights)) + 0.5) / len(weights)
    axes.contour(centres, centres, weights, levels=[0.0], colors=INK, linewidths=1.2)


def _range(weights: np.ndarray) -> str:
    low, high = weights.min(), weights.max()
    return f"w from {low:.3g} to {high:.3g}"


def _square(axes: Axes, title: str, ylabel: str) -> None:
    axes.set_title(title, fontsize=11, color=INK)
    axes.set_ylabel(ylabel, fontsize=10, color=INK)
    axes.set_xticks([0, 0.5, 1])
    axes.set_yticks([0, 0.5, 1])
    axes.tick_params(labelsize=8.5, colors=INK)


def plot_token_probabilities(tokens: TokenSample, path: Path, title: str) -> Path:
    """Figure 2: histogram and cumulative distribution of mu, and abs(pi - mu) against mu. Returns ``path``.

    Raises ValueError for a sample without tokens.
    """
    if not len(tokens.mu):
        raise ValueError("the token sample is empty")
    figure = new_figure(15, 4.6)
    steps = np.unique(tokens.step)
    span = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    figure.suptitle(f"{title}: {len(tokens.mu):,} sampled tokens, {span}", fontsize=12, color=INK)
    histogram, cumulative, shift = figure.subplots(1, 3)
    _histogram(histogram, tokens.mu)
    _cumulative(cumulative, tokens.mu)
    _shift(shift, tokens)
    return save(figure, path)


def _histogram(axes: Axes, mu: np.ndarray) -> None:
    dress(axes, "Rollout probability μ", "μ(y | s)", "share of tokens")
    axes.hist(mu, bins=np.linspace(0, 1, 51).tolist(), weights=np.full(len(mu), 1 / len(mu)), color=BLUE)
    axes.set_yscale("log")
    axes.set_xlim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))


def _cumulative(axes: Axes, mu: np.ndarray) -> None:
    dress(axes, "Cumulative distribution of μ", "μ(y | s)", "share of tokens at most μ")
    ordered = np.sort(mu)
    axes.step(ordered, np.arange(1, len(mu) + 1) / len(mu), where="post", color=BLUE, linewidth=1.8)
    rare = float((mu <= _RARE).mean())
    axes.axvline(_RARE, color=RED, linewidth=1, linestyle="--")
    axes.text(_RARE * 1.15, 0.95, f"μ ≤ {_RARE}: {rare:.1%} of tokens", color=RED, fontsize=9, va="top")
    axes.set_xscale("log")
    axes.set_xlim(min(ordered[0], _RARE / 10), 1)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))


def _shift(axes: Axes, tokens: TokenSample) -> None:
    """Single tokens as dots, with the median in each twentieth of mu's range."""
    dress(axes, "Mismatch |π − μ| against μ", "μ(y | s)", "|π − μ|")
    mu, tv = tokens.mu, tokens.tv
    axes.plot(mu, tv, ".", color=BLUE, markersize=3, alpha=min(1.0, max(0.08, 1000 / len(mu))), rasterized=True)
    edges = np.linspace(0, 1, 21)
    place = np.clip(np.digitize(mu, edges) - 1, 0, 19)
    filled = [i for i in range(20) if (place == i).any()]
    medians = [float(np.median(tv[place == i])) for i in filled]
    axes.plot(
        (edges[filled] + 0.025).tolist(), medians, color=ORANGE, linewidth=2, marker="o", markersize=4, label="median"
    )
    axes.set_yscale("log")
    axes.set_ylim(_LEAST_SHIFT, max(2 * tv.max(), 10 * _LEAST_SHIFT))
    axes.set_xlim(0, 1)
    below = float((tv < _LEAST_SHIFT).mean())
    if below > 0:
        text = f"{below:.1%} of the tokens are below {_LEAST_SHIFT:g}"
        axes.text(0.98, 0.02, text, transform=axes.transAxes, ha="right", fontsize=9, color=INK, bbox=_BOX)
    add_legend(axes, loc="upper left")
