"""Grouped decoding against the definition of attention."""

from typing import Any

import pytest
import torch

from megatron.rl.rollout.attention import grouped_decoding


def _reference(query, key, value, mask, scaling):
    """Softmax attention with each key-value head repeated for its query heads, in float64."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).float()


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (5, 1), (3, 3)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cached", [1, 7])
def test_one_position_over_a_cache(heads, kv_heads, masked, cached):
    generator = torch.Generator().manual_seed(heads + cached)
    # Laid out as a model's projection leaves it: positions before heads.
    query = torch.randn(3, 1, heads, 8, generator=generator).transpose(1, 2)
    key, value = (torch.randn(3, kv_heads, cached, 8, generator=generator) for _ in range(2))
    mask = torch.arange(cached) >= torch.arange(3)[:, None, None, None].clamp(max=cached - 1) if masked else None
    module = torch.nn.Module()
    output, weights = grouped_decoding(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    assert weights is None
    torch.testing.assert_close(output, _reference(query, key, value, mask, 0.3), atol=1e-6, rtol=1e-5)


def test_many_positions_are_causal():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    key, value = (torch.randn(2, 2, 5, 8, generator=generator) for _ in range(2))
    attention: Any = torch.nn.Module()
    attention.num_key_value_groups = 3
    output, _ = grouped_decoding(attention, query, key, value, None, scaling=0.3, dropout=0.0)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(output, _reference(query, key, value, causal, 0.3), atol=1e-6, rtol=1e-5)
