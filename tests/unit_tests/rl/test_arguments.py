"""The command line: precedence, Megatron's own flags, and every mistake in one line."""

import json

import pytest

from megatron.rl import assets
from megatron.rl.arguments import parse_arguments
from megatron.rl.errors import ConfigError, UserError


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")


def test_the_bare_command_takes_the_bundled_model():
    parsed = parse_arguments(["--loss", "drpo", "--fp8-format", "e4m3"])
    run, args = parsed.run, parsed.megatron
    assert run.hf_model == str(assets.bundled_model_dir())
    assert run.data.train_prompts == str(assets.bundled_train_prompts())
    assert (run.objective.name, run.objective.delta) == ("drpo", 12.5)
    assert (run.fp8_format, run.fp8_recipe) == ("e4m3", "tensorwise")
    assert args.num_experts == 8 and args.moe_router_topk == 2 and args.transformer_impl == "local"
    assert run.batching.total_multiple == 16
    assert run.trainer.steps_in_all() * run.trainer.iterations_per_step == run.trainer.train_iters
    assert (run.objective.eps_low, run.objective.eps_high) == (0.2, 0.28)


def test_gspo_clips_in_its_own_range_unless_told_otherwise():
    clips = []
    for flags in ([], ["--grpo-clamp-eps-upper", "0.1"]):
        objective = parse_arguments(["--loss", "gspo", *flags]).run.objective
        clips.append((objective.eps_low, objective.eps_high))
    assert clips == [(3e-4, 4e-4), (3e-4, 0.1)]


def test_explicit_megatron_flags_win():
    parsed = parse_arguments(
        [
            "--grpo-group-size",
            "4",
            "--grpo-prompts-per-step",
            "6",
            "--global-batch-size",
            "8",
            "--train-iters",
            "9",
            "--lr",
            "3e-5",
            "--seed",
            "7",
            "--rl-default-temperature",
            "0.7",
            "--rotary-base",
            "10000",
            "--moe-router-topk=2",
        ]
    )
    run, args = parsed.run, parsed.megatron
    assert (run.trainer.group_size, run.trainer.prompts_per_step, run.trainer.mini_batch_size) == (4, 6, 8)
    assert (run.trainer.iterations_per_step, run.trainer.steps_in_all()) == (3, 3)
    assert (args.lr, args.seed, run.sampling.temperature) == (3e-5, 7, 0.7)
    assert (args.rotary_base, args.moe_router_topk) == (10000, 2)


def test_hf_model_gives_the_architecture(tmp_path):
    config = json.loads((assets.bundled_model_dir() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6, "vocab_size": 101}))
    prompts = str(assets.bundled_train_prompts())
    parsed = parse_arguments(
        [
            "--hf-model",
            str(tmp_path),
            "--train-prompts",
            prompts,
            "--max-prompt-tokens",
            "9",
            "--max-response-tokens",
            "7",
        ]
    )
    assert (parsed.megatron.num_layers, parsed.megatron.vocab_size) == (6, 101)
    assert parsed.megatron.lr == 1e-6
    assert parsed.run.normalization.horizon == 7


def test_top_p_and_top_k_of_megatron_mean_none():
    sampling = parse_arguments([]).run.sampling
    assert (sampling.top_p, sampling.top_k) == (1.0, 0)


MISTAKES = {
    "--loss nonsense": "nonsense",
    "--loss-delta 0": "delta",
    "--loss-delta -1": "delta",
    "--grpo-group-size 1": "group",
    "--grpo-group-size 0": "group-size",
    "--tensor-model-parallel-size 3": "multiple of 3",
    "--tensor-model-parallel-size 2": "nproc-per-node",
    "--pipeline-model-parallel-size 5": "multiple of 5",
    "--expert-model-parallel-size 3": "does not divide",
    "--train-prompts nowhere.jsonl": "no such file",
    "--hf-model nowhere": "config.json",
    "--global-batch-size 7": "does not divide",
    "--micro-batch-size 7": "not a multiple",
    "--train-iters 7": "multiple",
    "--eval-interval 3": "multiple",
    "--max-response-tokens 100000": "positions",
    "--grpo-kl-beta 0.1": "reference model",
    "--rl-default-temperature 0": "positive",
    "--rl-generation-lag 1": "current policy only",
    "--fp8-format e4m3 --fp8-recipe blockwise": "blockwise",
    "--fp8-format e5m9": "fp8-format",
    "--no-such-flag": "no-such-flag",
    "--lr": "expected one argument",
    "--grpo-group-size many": "invalid int value",
    "--transformer-impl transformer_engine": "GPU",
    "--distributed-backend nccl": "gloo",
    "--fp16": "bf16",
    "--data-path x": "train-prompts",
    "--max-tokens-per-gpu 0": "max-tokens-per-gpu",
    "--max-tokens-per-gpu 23": "can need, 24; give at least 24",
    "--max-tokens-per-gpu 48 --micro-batch-size 2": "micro-batches are cut by tokens",
    "--rl-use-sequence-packing --micro-batch-size 2": "micro-batches are cut by tokens",
    "--max-tokens-per-gpu 48 --rl-sequence-packing-max-sequences-per-bin 3": "without --rl-use-sequence-packing",
    "--rl-use-sequence-packing --rl-sequence-packing-algo round-robin": "balanced",
    "--recompute-granularity selective --recompute-modules layernorm": "core_attn, mlp or moe",
    "--rollout-url http://127.0.0.1:1": "without servers (--rollout-engine vllm",
    "--weight-sync-dir /tmp": "without servers",
    "--rollout-engine sglang --rollout-url http://127.0.0.1:1 --rollout-server-args x": "started here",
    "--rollout-engine trt": "invalid choice",
    "--loss-normalization mean": "invalid choice",
    "--reward-workers 0": "reward-workers",
    "--eval-samples 0": "eval-samples",
    "--token-chunk 0": "token-chunk",
    "--loss drpo-topk": "most probable tokens",
    "--rl-default-top-p 0.9": "truncate",
    "--rl-default-top-k 20": "truncate",
    "--seed -1": "seed",
    "--optimizer sgd": "adam",
    "--reward-timeout 1e-9": "reward-timeout",
    "--save /dev/null": "file is in the way",
    "--lr nan": "lr",
    "--lr -1": "lr",
    "--rl-default-temperature nan": "positive",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(flags):
    with pytest.raises(UserError) as caught:
        parse_arguments(flags.split())
    message = str(caught.value)
    assert MISTAKES[flags] in message, message
    assert "\n" not in message and len(message) < 400


def test_help_lists_our_flags(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--loss-delta" in text and "--grpo-group-size" in text


def test_an_empty_config_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        parse_arguments(["--hf-model", str(tmp_path)])
