"""Per-token diagnostics: Binary-TV, ratio and gradient weight."""

import torch

from megatron.rl.objectives import get_objective, token_diagnostics


def test_drpo_weight_follows_its_closed_form():
    generator = torch.Generator().manual_seed(0)
    logp = torch.empty(200).uniform_(-5, 0, generator=generator)
    logmu = torch.empty(200).uniform_(-5, 0, generator=generator)
    advantage = torch.randn(200, generator=generator)
    _, slope = get_objective("drpo", delta=0.2)(logp, logmu, advantage)
    diagnostics = token_diagnostics(logp, logmu, advantage, slope)
    shift = logp.double().exp() - logmu.double().exp()
    torch.testing.assert_close(diagnostics.tv.double(), shift.abs(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(diagnostics.ratio.double(), (logp.double() - logmu.double()).exp(), rtol=1e-5, atol=0)
    expected = 1 - advantage.double().sign() * shift / 0.2
    torch.testing.assert_close(diagnostics.weight.double(), expected, rtol=1e-4, atol=1e-5)
    assert (diagnostics.weight >= 1 - 5).all() and (diagnostics.weight <= 1 + 5).all()


def test_weight_is_one_where_it_is_not_defined():
    logp = torch.tensor([-1.0, -0.1, -120.0])
    logmu = torch.tensor([-2.0, -91.0, -0.1])
    advantage = torch.tensor([0.0, 1.0, 1.0])  # no advantage; a ratio that overflows; one that underflows
    _, slope = get_objective("drpo", delta=0.2)(logp, logmu, advantage)
    diagnostics = token_diagnostics(logp, logmu, advantage, slope)
    assert diagnostics.weight.tolist() == [1, 1, 1]
    assert torch.isinf(diagnostics.ratio[1]) and diagnostics.ratio[2] == 0


def test_masked_tokens_are_zero():
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    logmu = torch.tensor([float("nan"), float("-inf")])
    value, slope = get_objective("drpo")(logp, logmu, torch.ones(2))
    diagnostics = token_diagnostics(logp, logmu, torch.ones(2), slope)
    assert all(values.tolist() == [0, 0] and not values.requires_grad for values in diagnostics)
