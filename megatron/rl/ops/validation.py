"""Checks of what the ops are given, in words.

Every check looks at tensors that are equal on all tensor-parallel ranks, so either all ranks raise or none does.
"""

import math

import torch

from megatron.rl.errors import ConfigError, DataError


class TokenError(DataError):
    """A token that cannot be trained on. ``token`` is its index in the op's inputs."""

    def __init__(self, message: str, token: int):
        super().__init__(message)
        self.token = token


def check_shapes(hidden: torch.Tensor, weight: torch.Tensor, per_token: dict[str, torch.Tensor], tokens: int) -> None:
    """Raises ValueError where shapes or types do not fit together."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "hidden must be [tokens, hidden_size] and weight [local vocabulary, hidden_size] "
            f"(got {list(hidden.shape)} and {list(weight.shape)})"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"hidden and weight must both be float32 or bfloat16 (got {hidden.dtype}, {weight.dtype})")
    for name, tensor in per_token.items():
        if tensor.shape != (tokens,):
            raise ValueError(f"{name} must hold one value for each of the {tokens} tokens (got {list(tensor.shape)})")


def inverse_temperature(temperature: float | torch.Tensor, tokens: int, device: torch.device) -> torch.Tensor | None:
    """1 / temperature per token, [tokens] float32, or None for a temperature of 1.

    Raises ConfigError for a temperature that is not positive and finite.
    """
    if isinstance(temperature, torch.Tensor):
        if temperature.shape not in ((), (tokens,)):
            raise ValueError(f"temperature must be a number or one for each token (got {list(temperature.shape)})")
        wrong = ~((temperature > 0) & torch.isfinite(temperature))
        if bool(wrong.any()):
            raise ConfigError(f"temperature must be positive and finite (got {temperature[wrong][0].item()})")
        return temperature.detach().to(device, torch.float32).reciprocal().expand(tokens)
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"temperature must be positive and finite (got {temperature})")
    return None if temperature == 1 else torch.full((tokens,), 1 / temperature, device=device)


def check_tokens(problems: dict[str, tuple[torch.Tensor, torch.Tensor]], tokens: torch.Tensor | slice) -> None:
    """Raises :class:`TokenError` for the first token with a problem.

    Args:
        problems: what must hold, in words -> ([n] bool where it does not hold, [n] the values to show).
        tokens: the index in the op's inputs of each of the n entries.
    """
    if not bool(torch.stack([bad.any() for bad, _ in problems.values()]).any()):
        return
    for rule, (bad, values) in problems.items():
        count = int(bad.sum())
        if count:
            entry = int(bad.nonzero()[0])
            token = entry if isinstance(tokens, slice) else int(tokens[entry])
            others = f", and {count - 1} more" if count > 1 else ""
            raise TokenError(f"{rule}; not so at token {token}{others} (got {values[entry].item()})", token)
