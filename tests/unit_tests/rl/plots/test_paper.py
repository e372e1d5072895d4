"""Figures 1 and 2 of arXiv 2606.09821."""

import numpy as np
import pytest

from megatron.rl.config import ObjectiveConfig
from megatron.rl.plots.paper import gradient_weights, plot_token_probabilities
from megatron.rl.run_log import TokenSample

POINTS = 50
CENTRES = (np.arange(POINTS) + 0.5) / POINTS
PI, MU = np.meshgrid(CENTRES, CENTRES, indexing="ij")
EXPECTED = [  # w by the paper's table 1; sign is that of A
    (ObjectiveConfig("drpo", delta=1.0), lambda sign: 1 - sign * (PI - MU)),
    (ObjectiveConfig("spo", eps=1.0), lambda sign: 1 - sign * (PI / MU - 1)),
    (ObjectiveConfig("dppo", delta=0.21), lambda sign: np.where(sign * (PI - MU) > 0.21, 0, 1)),
    (
        ObjectiveConfig("grpo", eps_low=0.2, eps_high=0.28),
        lambda sign: np.where(PI / MU > 1.28, 0, 1) if sign > 0 else np.where(PI / MU < 0.8, 0, 1),
    ),
]


@pytest.mark.parametrize(("config", "expected"), EXPECTED, ids=lambda case: getattr(case, "name", None))
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_weights_are_the_papers(config, expected, advantage):
    found = gradient_weights(config, advantage, POINTS)
    on_boundary = np.isclose(PI / MU, 1.28) | np.isclose(PI / MU, 0.8)  # there float32 may round either way
    np.testing.assert_allclose(found[~on_boundary], expected(advantage)[~on_boundary], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["one token", "equal", "impossible"])
def test_figure_2_is_drawn_for_any_sample(tmp_path, case):
    logmu = np.log(np.random.default_rng(0).random(500) + 1e-9).astype(np.float32)
    if case == "one token":
        logmu = logmu[:1]
    logp = logmu if case == "equal" else np.float32(1.01) * logmu
    if case == "impossible":
        logmu = np.full(3, -200.0, np.float32)  # exp of it is 0 in float32
        logp = logmu
    sample = TokenSample(np.ones(len(logmu), np.int32), logmu, logp)
    path = plot_token_probabilities(sample, tmp_path / "two.png", "a run")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_empty_sample_is_refused(tmp_path):
    nothing = np.empty(0, np.float32)
    with pytest.raises(ValueError, match="empty"):
        plot_token_probabilities(TokenSample(nothing.astype(np.int32), nothing, nothing), tmp_path / "two.png", "a run")
