"""The sample of tokens: what is drawn, its cap, and going on after a resume."""

import numpy as np
import pytest
import torch

from megatron.rl.errors import OutputError
from megatron.rl.run_log import TOKENS_FILE, TokenSampleWriter, read_tokens


def _tokens(step, count=7):
    """Log-probabilities that tell step and place."""
    logmu = -(torch.arange(count) + 100.0 * step + 1) / 1024
    return logmu / 2, logmu


def _steps(folder):
    return np.unique(read_tokens(folder).step).tolist()


def test_what_is_drawn_comes_back_in_pairs(tmp_path):
    writer = TokenSampleWriter(tmp_path / "run", seed=1)
    for step in (1, 2):
        writer.add(step, *_tokens(step))
    sample = read_tokens(tmp_path / "run")
    assert sorted(zip(sample.step.tolist(), sample.logmu.tolist(), strict=True)) == sorted(
        (step, value) for step in (1, 2) for value in _tokens(step)[1].tolist()
    )
    np.testing.assert_array_equal(sample.logp, sample.logmu / 2)
    np.testing.assert_allclose(sample.tv, np.abs(np.exp(sample.logmu.astype(float) / 2) - sample.mu), rtol=1e-12)


def test_a_step_gives_at_most_its_share_without_doubles(tmp_path):
    writer = TokenSampleWriter(tmp_path, seed=1, per_step=5, in_all=100)
    writer.add(1, *_tokens(1, count=31))
    sample = read_tokens(tmp_path)
    assert len(sample.step) == len(set(sample.logmu.tolist())) == 5
    assert set(sample.logmu.tolist()) <= set(_tokens(1, count=31)[1].tolist())


def test_the_draw_depends_on_seed_and_step_alone(tmp_path):
    drawn = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        TokenSampleWriter(tmp_path / name, seed=seed, per_step=5, in_all=10).add(1, *_tokens(1, count=31))
        drawn[name] = read_tokens(tmp_path / name).logmu.tolist()
    assert drawn["a"] == drawn["b"] != drawn["c"]


def test_a_full_sample_thins_out_evenly(tmp_path):
    writer = TokenSampleWriter(tmp_path, seed=1, per_step=7, in_all=28)
    for step in range(1, 18):
        writer.add(step, *_tokens(step))
    assert _steps(tmp_path) == [4, 8, 12, 16]
    assert len(read_tokens(tmp_path).step) == 28


def test_a_resumed_run_ends_with_the_sample_of_an_uninterrupted_one(tmp_path):
    whole = TokenSampleWriter(tmp_path / "whole", seed=1, per_step=7, in_all=28)
    cut = TokenSampleWriter(tmp_path / "cut", seed=1, per_step=7, in_all=28)
    for step in range(1, 18):
        whole.add(step, *_tokens(step))
        if step <= 9:
            cut.add(step, *_tokens(step))
    resumed = TokenSampleWriter(tmp_path / "cut", seed=1, per_step=7, in_all=28, resume_step=7)
    for step in range(8, 18):
        resumed.add(step, *_tokens(step))
    for ours, theirs in zip(
        vars(read_tokens(tmp_path / "cut")).values(), vars(read_tokens(tmp_path / "whole")).values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_new_run_begins_a_new_sample(tmp_path):
    TokenSampleWriter(tmp_path, seed=1).add(5, *_tokens(5))
    TokenSampleWriter(tmp_path, seed=1).add(1, *_tokens(1))
    assert _steps(tmp_path) == [1]


def test_a_step_without_tokens_adds_nothing(tmp_path):
    TokenSampleWriter(tmp_path, seed=1).add(1, torch.empty(0), torch.empty(0))
    assert not (tmp_path / TOKENS_FILE).exists()


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="in_all hold two steps"):
        TokenSampleWriter(tmp_path, seed=1, per_step=8, in_all=15)
    with pytest.raises(ValueError, match=r"must be \[tokens\]"):
        TokenSampleWriter(tmp_path, seed=1).add(1, torch.zeros(3), torch.zeros(4))


def test_missing_damaged_and_unwritable_files_are_named(tmp_path):
    with pytest.raises(OutputError, match=f"has no {TOKENS_FILE}"):
        read_tokens(tmp_path)
    (tmp_path / TOKENS_FILE).write_bytes(b"PK\x03\x04 not a zip file")
    with pytest.raises(OutputError, match=f"{TOKENS_FILE} is no token sample"):
        read_tokens(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        TokenSampleWriter(tmp_path / "file" / "run", seed=1).add(1, *_tokens(1))
