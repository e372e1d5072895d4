"""What all paths are given, and the exact answer in float64."""

from dataclasses import dataclass

import torch

_CHUNK = 128  # tokens whose logits exist at a time while inputs and exact answers are made
_SPREAD = 2.0  # standard deviation of the logits
_DRIFT = 0.1  # standard deviation of log pi - log mu


@dataclass(frozen=True)
class Inputs:
    """One call's inputs; hidden states and weight of one type, the per-token values float32."""

    hidden: torch.Tensor  # [tokens, hidden size]
    weight: torch.Tensor  # [vocabulary, hidden size]
    target_ids: torch.Tensor  # [tokens], sampled from the policy
    behavior_logprobs: torch.Tensor  # [tokens], nats
    advantages: torch.Tensor  # [tokens]
    loss_weights: torch.Tensor  # [tokens], each 1 / tokens

    @property
    def tokens(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]


def make_inputs(
    tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Inputs:
    """Random hidden states and weight, tokens sampled from them, and a behaviour that is the policy with noise."""
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    hidden = noise(tokens, hidden_size).to(dtype)
    weight = noise(vocab_size, hidden_size).mul_(_SPREAD / hidden_size**0.5).to(dtype)
    target_ids = torch.empty(tokens, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, device=device)
    for first in range(0, tokens, _CHUNK):
        rows = slice(first, first + _CHUNK)
        log_pi = (hidden[rows] @ weight.t()).float().log_softmax(-1)
        drawn = torch.multinomial(log_pi.exp(), 1, generator=generator)
        target_ids[rows] = drawn.squeeze(1)
        logprobs[rows] = log_pi.gather(1, drawn).squeeze(1)
    return Inputs(
        hidden,
        weight,
        target_ids,
        (logprobs + _DRIFT * noise(tokens)).clamp(max=0.0),
        noise(tokens),
        torch.full((tokens,), 1 / tokens, device=device),
    )


@dataclass(frozen=True)
class Answer:
    """What one path, or exact arithmetic, makes of the inputs."""

    grad_hidden: torch.Tensor
    grad_weight: torch.Tensor
    logprobs: torch.Tensor | None  # [tokens], nats; None where the path keeps them to itself


def exact_answer(inputs: Inputs) -> Answer:
    """The policy gradient of - sum(loss_weights * r * A) and the log-probabilities, in float64, chunk by chunk."""
    weight = inputs.weight.double()
    grad_hidden = torch.empty_like(inputs.hidden, dtype=torch.float64)
    grad_weight = torch.zeros_like(weight)
    logprobs = torch.empty(inputs.tokens, dtype=torch.float64, device=weight.device)
    for first in range(0, inputs.tokens, _CHUNK):
        rows = slice(first, first + _CHUNK)
        hidden, targets = inputs.hidden[rows].double(), inputs.target_ids[rows].unsqueeze(1)
        log_pi = (hidden @ weight.t()).log_softmax(-1)
        logprobs[rows] = log_pi.gather(1, targets).squeeze(1)
        ratio = (logprobs[rows] - inputs.behavior_logprobs[rows].double()).exp()
        slope = -inputs.loss_weights[rows].double() * ratio * inputs.advantages[rows].double()
        grad_logits = log_pi.exp_().mul_(-slope.unsqueeze(1)).scatter_add_(1, targets, slope.unsqueeze(1))
        grad_hidden[rows] = grad_logits @ weight
        grad_weight.addmm_(grad_logits.t(), hidden)
    return Answer(grad_hidden, grad_weight, logprobs)
