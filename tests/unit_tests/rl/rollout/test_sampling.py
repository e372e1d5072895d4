"""Tokens are drawn with exactly the probabilities that are recorded."""

import math

import pytest
import torch

from megatron.rl.config import SamplingConfig
from megatron.rl.rollout.sampling import draw_tokens, sampled_logprobs


def _reference(logits: list[float], sampling: SamplingConfig) -> list[float]:
    """Probabilities by the definition, in Python floats."""
    weights = [math.exp(logit / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))[: sampling.top_k or None]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        if sampling.top_p < 1 and mass >= sampling.top_p:
            break
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 3), (0.5, 7), (1e-6, 0), (1.0, 1), (0.9, 999)])
def test_probabilities_follow_the_definition_and_are_renormalised(temperature, top_p, top_k):
    sampling = SamplingConfig(4, temperature, top_p, top_k)
    logits = 2 * torch.randn(7, 13, generator=torch.Generator().manual_seed(1))
    logprobs = sampled_logprobs(logits, sampling)
    expected = torch.tensor([_reference(row, sampling) for row in logits.tolist()])
    torch.testing.assert_close(logprobs.exp(), expected, atol=1e-6, rtol=1e-5)
    assert (logprobs.isinf() == (expected == 0)).all()


@pytest.mark.parametrize("sampling", [SamplingConfig(1, top_k=2), SamplingConfig(1, top_p=0.5)])
def test_ties_at_the_edge_go_to_the_lower_id_and_no_token_too_many_is_kept(sampling):
    logprobs = sampled_logprobs(torch.zeros(1, 4), sampling)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))


@pytest.mark.parametrize("sampling", [SamplingConfig(1, 0.6), SamplingConfig(1, 1.0, 0.8, 9)])
def test_an_even_grid_of_uniforms_draws_each_token_in_proportion(sampling):
    count = 10_007
    logits = (2 * torch.randn(1, 11, generator=torch.Generator().manual_seed(2))).expand(count, -1)
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, logprobs = draw_tokens(logits, uniforms, sampling)
    expected = count * torch.tensor(_reference(logits[0].tolist(), sampling))
    assert (tokens.bincount(minlength=11) - expected).abs().max() <= 1.01  # both ends of a token's stretch are rounded
    torch.testing.assert_close(logprobs, (expected / count)[tokens].log(), atol=1e-6, rtol=1e-5)


def test_rare_tokens_of_a_large_vocabulary_keep_their_share():
    vocabulary = 100_003
    logits = torch.zeros(1, vocabulary)
    logits[0, 0] = 20.0  # the others have 2e-9 each: less than a float32 step of the cumulative sum
    probs = sampled_logprobs(logits, SamplingConfig(1)).exp()[0].double()
    wanted = torch.tensor([0, 1, 2, 50_000, vocabulary - 1])
    middle = (probs.cumsum(0)[wanted] - probs[wanted] / 2) / probs.sum()
    tokens, _ = draw_tokens(logits.expand(len(wanted), -1), middle, SamplingConfig(1))
    assert tokens.tolist() == wanted.tolist()


@pytest.mark.parametrize("uniform", [2.0**-53, 1.0])
def test_impossible_tokens_at_either_end_are_never_drawn(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf, -torch.inf]])
    tokens, logprobs = draw_tokens(logits, torch.tensor([uniform], dtype=torch.float64), SamplingConfig(1))
    assert tokens.item() in (1, 2)
    assert logprobs.isfinite().all()


def test_temperature_zero_takes_the_most_probable_token_with_certainty():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, -1.0]])
    tokens, logprobs = draw_tokens(logits, torch.ones(2, dtype=torch.float64), SamplingConfig(1, temperature=0))
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sampling", [SamplingConfig(1), SamplingConfig(1, 0.7, 0.9, 2), SamplingConfig(1, 0.0)])
def test_logits_that_are_not_finite_give_nan(sampling):
    logits = torch.zeros(3, 4)
    logits[1, 2] = torch.nan
    _, logprobs = draw_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), sampling)
    assert logprobs.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("sampling", [SamplingConfig(1), SamplingConfig(1, 0.7, 0.9, 2)])
def test_logits_are_left_as_they_are_and_logprobs_are_float32(sampling):
    logits = torch.randn(3, 4).bfloat16()
    before = logits.clone()
    _, logprobs = draw_tokens(logits, torch.full((3,), 0.5, dtype=torch.float64), sampling)
    assert torch.equal(logits, before)
    assert logprobs.dtype == torch.float32
    assert (logprobs <= 0).all()
