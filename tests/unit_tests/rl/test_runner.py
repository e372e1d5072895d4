"""What is decided between the command line and the trainer, and the order of the checks."""

import json
from unittest import mock

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402

from megatron.rl import assets, runner  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.errors import ConfigError, RewardError  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)


def test_the_bundled_tokenizer_loads():
    tokenizer = runner.load_tokenizer(str(assets.bundled_model_dir()))
    assert tokenizer.decode(tokenizer.encode("12+34="), skip_special_tokens=True) == "12+34="


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (None, "no tokenizer there"),
        ("{", "tokenizer cannot be loaded"),
        ("[]", "tokenizer cannot be loaded"),
        ("{}", "tokenizer cannot be loaded"),
        ('{"added_tokens": [], "model": {"type": "X"}}', "tokenizer cannot be loaded"),
    ],
)
def test_a_folder_without_its_tokenizer_is_told_in_one_line(tmp_path, damage, message):
    (tmp_path / "config.json").write_text((assets.bundled_model_dir() / "config.json").read_text())
    if damage is not None:
        (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(ConfigError, match=message) as caught:
        runner.load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_flags_reach_the_objective():
    """Clip-higher of GRPO with another upper bound: the gradient stops at a ratio of 1.5, not of 1.28."""
    objective = runner._objective(parse_arguments(["--loss", "grpo", "--grpo-clamp-eps-upper", "0.5"]).run)
    log_mu = torch.full((3,), -2.0)
    ratios = torch.tensor([1.2, 1.4, 1.6])
    _, slope = objective(log_mu + ratios.log(), log_mu, torch.ones(3))
    assert slope.tolist() == pytest.approx([1.2, 1.4, 0.0])
    unweighted = runner._objective(parse_arguments(["--loss-delta", "0.2", "--no-loss-advantage-weight"]).run)
    value, _ = unweighted(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([0.0]))
    assert value.item() < 0  # the regulariser acts without an advantage


def _run_without_model(rank: int, world_size: int, argv: list[str]) -> str:
    built = AssertionError("built")
    with (
        mock.patch("megatron.rl.setup.build_policy", side_effect=built),
        mock.patch("torch.distributed.destroy_process_group"),  # the test's own
        pytest.raises(RewardError) as caught,
    ):
        runner.run(argv)
    return str(caught.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_problems_none_of_which_can_be_scored_stop_the_run_before_a_model_is_built(tmp_path, ranks):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    argv = ["--train-prompts", str(path), "--reward", "reasoning-gym", "--run-dir", str(tmp_path / "run")]
    for message in run_ranks(ranks, _run_without_model, argv):
        assert message.startswith(f"{path}: no response to any problem can score 1 by --reward reasoning-gym")
        assert "\n" not in message
    assert not (tmp_path / "run").exists()


def test_scorers_are_closed_whatever_happens():
    scorer = mock.MagicMock()
    scorer.__enter__.return_value = scorer
    with (
        mock.patch.object(runner, "make_scorer", return_value=scorer),
        mock.patch("megatron.rl.setup.initialize", side_effect=RuntimeError("broken")),
        pytest.raises(RuntimeError, match="broken"),
    ):
        runner.run([])
    scorer.__exit__.assert_called_once()
