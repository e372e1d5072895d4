"""The table of metrics and its page."""

from pathlib import Path

from megatron.rl.run_log import METRICS, PHASES, metrics_page

PAGE = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"


def test_the_page_is_the_tables():
    assert PAGE.read_text() == metrics_page(), "docs/metrics.md is stale: write metrics_page() to it"


def test_every_metric_has_unit_and_meaning():
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert metric.meaning, name
        assert "|" not in metric.unit + metric.meaning, name  # would break the page's table


def test_every_phase_has_its_time():
    assert {f"time/{phase}" for phase in PHASES} < METRICS.keys()
