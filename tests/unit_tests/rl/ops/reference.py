"""What the ops must compute, with whole logits: in float64, and as the plain path in the inputs' own type."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.unit_tests.rl.objectives.reference import FORMULAS


@dataclass
class Case:
    """One call's inputs, of all ranks together; the weight has its true rows only."""

    hidden: torch.Tensor
    weight: torch.Tensor
    target_ids: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    temperature: float | torch.Tensor = 1.0
    entropy_coeff: float = 0.0

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]


@dataclass
class Answer:
    """Results of one path, in float64."""

    loss: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    logsumexp: torch.Tensor
    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor


def make_case(
    tokens: int,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype=torch.float32,
    masked=0.4,
    seed=0,
    spread=2.0,
    **options: Any,
) -> Case:
    """Random inputs whose behaviour is the policy with noise; masked tokens carry what must not be read."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab_size, hidden_size, generator=generator) * spread / hidden_size**0.5).to(dtype)
    target_ids = torch.randint(vocab_size, (tokens,), generator=generator)
    temperature = options.get("temperature", 1.0)
    temperature = temperature.double().unsqueeze(1) if isinstance(temperature, torch.Tensor) else temperature
    logits = hidden.double() @ weight.double().t() / temperature
    log_pi = logits.log_softmax(-1).gather(1, target_ids.unsqueeze(1)).squeeze(1)
    behavior = (log_pi + 0.3 * torch.randn(tokens, generator=generator)).clamp(max=-1e-4).float()
    advantages = torch.randn(tokens, generator=generator)
    loss_weights = torch.rand(tokens, generator=generator) / max(tokens, 1)
    mask = torch.rand(tokens, generator=generator) < masked
    loss_weights[mask] = 0
    poison = torch.tensor([float("nan"), float("-inf"), -91.0])
    places = mask.nonzero().squeeze(1)
    behavior[places] = poison[torch.arange(len(places)) % 3]
    advantages[places[::2]] = float("nan")
    target_ids[places[::3]] = -100
    return Case(hidden, weight, target_ids, behavior, advantages, loss_weights, **options)


def answer(
    case: Case,
    name: str = "drpo",
    dtype: torch.dtype | None = torch.float64,
    value_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    **constants: float,
) -> Answer:
    """Loss and gradients by autograd over whole logits.

    With ``dtype`` the arithmetic's type is that; without, it is the plain path: a product in the inputs' type whose
    logits are widened to float32. The objective is the formula called ``name``, or ``value_of`` (log-probabilities
    [n, vocabulary] of the unmasked tokens, [tokens] bool which these are) -> J [n].
    """
    case_type = case.hidden.dtype if dtype is None else dtype
    softmax_type = torch.float32 if dtype is None else dtype
    constants = {"delta": 0.2, "eps": 0.2, "eps_low": 0.2, "eps_high": 0.28} | constants
    keep = case.loss_weights != 0
    hidden = case.hidden.to(case_type).clone().requires_grad_(True)
    weight = case.weight.to(case_type).clone().requires_grad_(True)
    temperature = case.temperature
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.to(softmax_type)[keep].unsqueeze(1)
    logits = (hidden[keep] @ weight.t()).to(softmax_type) / temperature
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax.gather(1, case.target_ids[keep].unsqueeze(1)).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    advantage = case.advantages[keep].to(softmax_type)
    mu = case.behavior_logprobs[keep].to(softmax_type).exp()
    if value_of is None:
        value = FORMULAS[name](logprobs.exp(), mu, advantage, advantage.abs(), constants).to(softmax_type)
    else:
        value = value_of(log_softmax, keep)
    loss_weights = case.loss_weights[keep].to(softmax_type)
    loss = -(loss_weights * (value + case.entropy_coeff * entropy)).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, weight))

    def everywhere(values: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(len(keep), dtype=torch.float64)
        result[keep] = values.detach().double()
        return result

    return Answer(
        loss.detach().double(),
        everywhere(logprobs),
        everywhere(entropy),
        everywhere(logits.logsumexp(-1)),
        grad_hidden.double(),
        grad_weight.double(),
    )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth; 0 for two zeros."""
    got, expected = got.detach().double(), expected.detach().double()
    difference, scale = torch.linalg.vector_norm(got - expected), torch.linalg.vector_norm(expected)
    return float(difference / scale) if scale > 0 else float(difference)


def padded(weight: torch.Tensor, multiple: int, fill: float = 7.0) -> torch.Tensor:
    """The weight with rows of padding up to a multiple; they are far from zero, so that none can enter unseen."""
    rows = -weight.shape[0] % multiple
    return torch.cat([weight, torch.full((rows, weight.shape[1]), fill, dtype=weight.dtype)])
