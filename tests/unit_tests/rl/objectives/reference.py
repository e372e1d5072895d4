"""The objectives as plain float64 formulas, differentiated by autograd: independent of the code under test."""

from collections.abc import Callable

import torch


def _kl_binary(pi, mu):
    return torch.xlogy(mu, mu / pi) + torch.xlogy(1 - mu, (1 - mu) / (1 - pi))


def _ppo(pi, mu, a, s, c):
    r = pi / mu
    return torch.minimum(r * a, r.clamp(1 - c["eps_low"], 1 + c["eps_high"]) * a)


def _outside(pi, mu, c):
    return ((pi - mu).abs() > c["delta"]).double().detach()


def _dppo(pi, mu, a, s, c):
    keep = (a.sign() * (pi - mu) <= c["delta"]).double().detach()
    return keep * pi / mu * a


def _dppo_kl(pi, mu, a, s, c):
    stop = (_kl_binary(pi, mu) > c["delta"]) & (a.sign() * (pi - mu) > 0)
    return (~stop).double() * pi / mu * a


# name -> J(pi, mu, advantage, strength of the regulariser, constants)
FORMULAS: dict[str, Callable] = {
    "pg": lambda pi, mu, a, s, c: pi / mu * a,
    "grpo": _ppo,
    "spo": lambda pi, mu, a, s, c: pi / mu * a - s / (2 * c["eps"]) * (pi / mu - 1) ** 2,
    "dppo": _dppo,
    "dppo-kl": _dppo_kl,
    "drpo": lambda pi, mu, a, s, c: pi / mu * a - s / (2 * c["delta"]) * mu * (pi / mu - 1) ** 2,
    "kl": lambda pi, mu, a, s, c: pi / mu * a + s / (2 * c["delta"]) * (pi / mu).log(),
    "k3": lambda pi, mu, a, s, c: pi / mu * a - s / (2 * c["delta"]) * (pi / mu - 1 - (pi / mu).log()),
    "tv": lambda pi, mu, a, s, c: pi / mu * a - s / (2 * c["delta"]) * (pi / mu - 1).abs(),
    "mask-drpo": lambda pi, mu, a, s, c: (
        pi / mu * a - _outside(pi, mu, c) * s / (2 * c["delta"]) * mu * (pi / mu - 1) ** 2
    ),
    "mask-spo": lambda pi, mu, a, s, c: pi / mu * a - _outside(pi, mu, c) * s / (2 * c["delta"]) * (pi / mu - 1) ** 2,
    "mask-kl": lambda pi, mu, a, s, c: (
        pi / mu * a - _outside(pi, mu, c) * s / (2 * c["delta"]) * (pi / mu).log() ** 2 / 2
    ),
}


def reference(name, logp, logmu, advantage, *, advantage_weight=True, **constants):
    """(J, dJ/dlogp) in float64."""
    constants = {"delta": 12.5, "eps": 0.2, "eps_low": 0.2, "eps_high": 0.28} | constants
    logp = logp.double().detach().requires_grad_(True)
    a = advantage.double()
    strength = a.abs() if advantage_weight else torch.ones_like(a)
    value = FORMULAS[name](logp.exp(), logmu.double().exp(), a, strength, constants)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    return value.detach(), slope
