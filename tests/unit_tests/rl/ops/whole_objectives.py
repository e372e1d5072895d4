"""Inputs and float64 answers of the objectives that need more than the sampled token: drpo-topk and gspo."""

import torch

from megatron.rl.objectives import get_objective
from megatron.rl.ops import PolicyLossOutput, fused_linear_policy_loss
from tests.unit_tests.rl.ops.reference import Answer, Case, answer

DELTA, LOW, HIGH = 0.2, 0.02, 0.03


def candidates_of(case: Case, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The behaviour's ``count`` most probable tokens, some absent or of probability 0; what is masked is poison."""
    generator = torch.Generator().manual_seed(seed)
    temperature = case.temperature
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(1)
    logits = case.hidden.detach().float() @ case.weight.detach().float().t() / temperature
    noisy = (logits + 0.5 * torch.randn(logits.shape, generator=generator)).log_softmax(1)
    logprobs, ids = noisy.topk(count, dim=1)
    ids[torch.rand(ids.shape, generator=generator) < 0.1] = -1
    logprobs[torch.rand(ids.shape, generator=generator) < 0.1] = -torch.inf
    masked = case.loss_weights == 0
    ids[masked], logprobs[masked] = 10**6, torch.nan
    return ids, logprobs


def topk_answer(case: Case, ids: torch.Tensor, logprobs: torch.Tensor, dtype=torch.float64) -> Answer:
    """By autograd, with S written out as a set."""

    def value_of(log_softmax: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        values = []
        rows = zip(
            log_softmax,
            case.target_ids[keep].tolist(),
            case.behavior_logprobs[keep].to(log_softmax.dtype),
            case.advantages[keep].to(log_softmax.dtype),
            ids[keep].tolist(),
            logprobs[keep].to(log_softmax.dtype),
            strict=True,
        )
        for logp, target, logmu, advantage, named, named_logmu in rows:
            mu = {token: x.exp() for token, x in zip(named, named_logmu, strict=True) if token >= 0}
            mu[target] = logmu.exp()
            penalty = sum((logp[token].exp() - x) ** 2 for token, x in mu.items())
            values.append((logp[target] - logmu).exp() * advantage - advantage.abs() / (2 * DELTA) * penalty)
        return torch.stack(values) if values else log_softmax.new_zeros(0)

    return answer(case, value_of=value_of, dtype=dtype)


def gspo_answer(case: Case, sequence_ids: torch.Tensor, dtype=torch.float64) -> Answer:
    """By autograd, sequence by sequence."""

    def value_of(log_softmax: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        logp = log_softmax.gather(1, case.target_ids[keep].unsqueeze(1)).squeeze(1)
        log_ratio = logp - case.behavior_logprobs[keep].to(logp.dtype)
        ids, advantage = sequence_ids[keep], case.advantages[keep].to(logp.dtype)
        ratio = torch.zeros_like(logp)
        for one in ids.unique():
            ratio = torch.where(ids == one, log_ratio[ids == one].mean().exp(), ratio)
        return torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)

    return answer(case, value_of=value_of, dtype=dtype)


def loss_of(case: Case, **options) -> PolicyLossOutput:
    """The op's, with drpo-topk where it is given candidates, else gspo."""
    name = "drpo-topk" if "topk_ids" in options else "gspo"
    return fused_linear_policy_loss(
        case.hidden,
        case.weight,
        case.target_ids,
        case.behavior_logprobs,
        case.advantages,
        case.loss_weights,
        get_objective(name, delta=DELTA, eps_low=LOW, eps_high=HIGH),
        **{
            "vocab_size": case.vocab_size,
            "temperature": case.temperature,
            "entropy_coeff": case.entropy_coeff,
            "token_chunk": 16,
        }
        | options,
    )
