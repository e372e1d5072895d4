"""The curves: what is drawn from which numbers."""

import math

import numpy as np
import pytest

from megatron.rl.plots.curves import PANELS, Table, plot_curves
from megatron.rl.plots.style import new_figure
from megatron.rl.run_log import read_metrics
from tests.unit_tests.rl.plots.fake_run import write_run

PANEL = {panel.name: panel for panel in PANELS}


def _axes(name, records):
    axes = new_figure(7, 4).subplots()
    PANEL[name].render(axes, Table(records))
    return axes


def _lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return read_metrics(write_run(tmp_path_factory.mktemp("run"), 5))


@pytest.mark.parametrize("steps", [1, 50])
def test_every_panel_draws_short_and_long_runs(tmp_path, steps):
    records = read_metrics(write_run(tmp_path / "run", steps))
    figure = new_figure(12, 12)
    for axes, panel in zip(figure.subplots(4, 3).flat, PANELS, strict=True):
        panel.render(axes, Table(records))
        assert "not recorded" not in [text.get_text() for text in axes.texts], panel.name
        assert axes.has_data(), panel.name
    figure.canvas.draw()


def test_reward_has_training_and_evaluation(records):
    lines = _lines(_axes("reward", records))
    assert lines["training"] == ([1, 2, 3, 4, 5], [record["reward/mean"] for record in records[1:]])
    assert lines["evaluation"] == ([0, 5], [0.3, 0.35])


def test_a_noisy_curve_is_drawn_with_its_mean():
    values = np.random.default_rng(0).normal(size=60).tolist()
    lines = _lines(_axes("loss", [{"step": i + 1, "train/loss": value} for i, value in enumerate(values)]))
    steps, mean = lines["mean of 5 steps"]
    assert len(steps) == 60
    assert mean[10] == pytest.approx(np.mean(values[8:13]))


@pytest.mark.parametrize(("zero", "scale"), [(False, "log"), (True, "symlog")])
def test_shifts_are_logarithmic_and_zeros_stay_visible(zero, scale):
    records = [
        {"step": 1, "tv/mean": 0.01, "tv/p50": 0.0 if zero else 0.001},
        {"step": 2, "tv/mean": 0.02, "tv/p50": 0.002},
    ]
    axes = _axes("tv", records)
    assert axes.get_yscale() == scale
    assert axes.get_ylim()[0] <= (0 if zero else 0.001)


def test_weights_below_zero_have_their_line(records):
    assert "reversed below" in _lines(_axes("weight", records))
    mild = [record | {"weight/min": 0.95} for record in records if "weight/min" in record]
    assert "reversed below" not in _lines(_axes("weight", mild))


def test_what_is_not_recorded_is_said(tmp_path):
    written, left_out = plot_curves([{"step": 1, "reward/mean": 0.5}], tmp_path, "a run")
    assert [path.name for path in written] == ["curves.png", "reward.png"]
    assert len(left_out) == len(PANELS) - 1
    assert "loss.png is left out: the run recorded nothing of it" in left_out


def test_values_that_are_not_finite_are_counted(tmp_path):
    records = [
        {"step": 1, "train/loss": math.nan},
        {"step": 2, "train/loss": 1.0},
        {"step": 3, "train/loss": -math.inf},
    ]
    _, left_out = plot_curves(records, tmp_path, "a run")
    assert "train/loss: values not finite, not drawn: 2" in left_out
    assert next(iter(_lines(_axes("loss", records)).values())) == ([2], [1.0])
