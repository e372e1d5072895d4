"""All figures of a run folder, by the function and by the tool."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron.rl.errors import OutputError
from megatron.rl.plots import plot_run
from megatron.rl.plots.curves import PANELS
from megatron.rl.run_log import RunLog
from tests.unit_tests.rl.plots.fake_run import write_run

TOOL = Path(__file__).resolve().parents[4] / "tools" / "plot_run.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("plot_run_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_draws_a_run_and_says_what(tmp_path, tool, capsys):
    run, out = write_run(tmp_path / "run", 3), tmp_path / "out"
    assert tool.main([str(run), "--out", str(out)]) == 0
    files = sorted(out.iterdir())
    assert sorted(capsys.readouterr().out.splitlines()) == [f"wrote {path}" for path in files]
    figures = {"curves", "figure1_gradient_weights", "figure2_token_probabilities", *(panel.name for panel in PANELS)}
    assert {path.stem for path in files} == figures
    assert not (run / "plots").exists()
    for path in files:
        with Image.open(path) as image:
            assert image.format == "PNG"
            assert min(image.size) > 400
            assert np.asarray(image.convert("L")).std() > 5, f"{path} is blank"


def test_a_run_without_tokens_lacks_figure_2_and_says_so(tmp_path):
    with RunLog(tmp_path, rank=0) as log:
        log.write({"step": 1, "reward/mean": 0.5})
    report = plot_run(tmp_path)
    assert "figure2_token_probabilities.png is left out: the run has no tokens.npz" in report.left_out
    assert {path.name for path in report.written} == {"curves.png", "reward.png", "figure1_gradient_weights.png"}
    assert {path.parent for path in report.written} == {tmp_path / "plots"}


def test_a_folder_without_a_run_is_one_line_and_status_2(tmp_path, tool, capsys):
    assert tool.main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: {tmp_path} has no metrics.jsonl; give the folder of a run (--run-dir)\n"
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path):
    run = write_run(tmp_path / "run", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file/out/curves.png cannot be written"):
        plot_run(run, tmp_path / "file" / "out")
