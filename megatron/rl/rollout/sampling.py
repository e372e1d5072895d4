"""Inverse transform sampling: one uniform number decides one token, whatever else is in the batch."""

import torch

from megatron.rl.config import SamplingConfig


def sampled_logprobs(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled from, -inf where truncation leaves nothing.

    Order of steps: temperature, the ``top_k`` most probable tokens, then the smallest set of the most probable of
    these that holds ``top_p`` of their mass, renormalised. Of equally probable tokens the lower id comes first.

    Args:
        logits: [rows, vocabulary].
        sampling: with a positive temperature.

    Returns:
        float32 [rows, vocabulary], in nats.
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
    if sampling.top_p == 1 and not 0 < sampling.top_k < logits.shape[-1]:
        return logprobs
    ranked, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        probs = torch.softmax(ranked, dim=-1).double()
        mass_before = probs.cumsum(-1) - probs
        ranked.masked_fill_(mass_before >= sampling.top_p, -torch.inf)
    return torch.log_softmax(torch.empty_like(ranked).scatter_(-1, ids, ranked), dim=-1)


def draw_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: SamplingConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row, and the log-probability with which it was drawn.

    At temperature 0 the most probable token is drawn, from a distribution that has it alone: log-probability 0.

    Args:
        logits: [rows, vocabulary].
        uniforms: float64 [rows] in (0, 1], one draw for each row.
        sampling: temperature and truncation of all rows.

    Returns:
        Token ids, int64 [rows], and log-probabilities, float32 [rows], in nats. A row whose logits are not finite
        has log-probability NaN.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1), torch.where(logits.isnan().any(-1), torch.nan, 0.0)
    logprobs = sampled_logprobs(logits, sampling)
    # float64: with float32 sums the rare tokens of a large vocabulary would be drawn with other probabilities.
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    # The first token whose cumulative probability reaches the target always has a probability of its own.
    tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:]).squeeze(-1)
    tokens.clamp_(max=logits.shape[-1] - 1)  # only NaN rows end past the vocabulary; their log-probability tells
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
