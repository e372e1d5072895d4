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


# What contradicts the bundled model, or does nothing beside the other flags.
WITHOUT_EFFECT = {
    "--num-layers 3": "--num-layers 3 contradicts the model in --hf-model, which has 2",
    "--hidden-size 128": "which has 64",
    "--rotary-base 500": "which has 10000",
    "--moe-router-topk=1": "which has 2",
    "--normalization LayerNorm": "which has RMSNorm",
    "--untie-embeddings-and-output-weights --vocab-size 54": "which has 53",
    "--attention-dropout 0.1": "which has 0.0",
    "--norm-epsilon 1e-5": "which has 1e-06",
    "--add-qkv-bias": "which has False",
    "--moe-router-score-function sigmoid": "which has softmax",
    "--rope-scaling-factor 4": "no effect on the model",
    "--loss grpo --loss-delta 0.2": "--loss-delta 0.2 has no effect without a --loss that has a delta",
    "--loss-eps 0.1": "without --loss spo",
    "--grpo-clamp-eps-upper 0.3": "without --loss grpo or gspo",
    "--loss k3 --no-loss-advantage-weight": "without a --loss with an advantage weight",
    "--loss-normalization token-mean --loss-horizon 8": "without --loss-normalization seq-mean-token-sum-norm",
    "--reward exact --reward-timeout 9": "without a --reward that runs in workers",
    "--calculate-per-token-loss": "token-mean",
    "--sequence-parallel": "without --tensor-model-parallel-size above 1",
    "--num-layers-per-virtual-pipeline-stage 1": "without --pipeline-model-parallel-size above 1",
    "--cp-comm-type a2a": "without --context-parallel-size above 1",
    "--min-lr 1e-7": "without an --lr-decay-style other than constant",
    "--lr-decay-iters 10": "without an --lr-decay-style other than constant",
    "--lr-warmup-init 1e-7": "without --lr-warmup-iters",
    "--lr-wsd-decay-iters 10": "without --lr-decay-style WSD",
    "--start-weight-decay 0.1": "without --weight-decay-incr-style",
    "--weight-decay 0.1 --weight-decay-incr-style linear": "without --weight-decay-incr-style constant",
    "--decoupled-min-lr 1e-5": "without --decoupled-lr",
    "--moe-aux-loss-coeff 0.01": "depend on how a mini-batch is cut",
    "--moe-router-load-balancing-type aux_loss": "depend on how a mini-batch is cut",
    "--moe-grouped-gemm": "without Transformer Engine",
    "--moe-enable-deepep": "without GPUs",
    "--attention-backend flash": "without Transformer Engine",
    "--fp8-format e4m3 --no-fp8-wgrad": "without Transformer Engine",
    "--fp8-recipe mxfp8": "without --fp8-format",
    "--grad-reduce-in-bf16": "without --bf16",
    "--no-use-distributed-optimizer --loss-scale 8": "without --bf16 or the distributed optimizer",
    "--no-use-distributed-optimizer --no-check-for-nan-in-loss-and-grad": "applies what is not finite",
    "--ddp-bucket-size 1000": "without --overlap-grad-reduce",
    "--recompute-modules mlp": "without --recompute-granularity selective",
    "--recompute-granularity selective --recompute-num-layers 1": "without --recompute-granularity full",
    "--ckpt-step 2": "without --load",
    "--finetune": "without --load",
    "--no-load-optim": "without --load",
    "--load x --finetune --no-load-optim": "without --load without --finetune",
    "--load x --no-load-optim --use-checkpoint-opt_param-scheduler": "without an optimizer that goes on",
    "--exit-signal SIGUSR1": "without --exit-signal-handler",
    "--seq-length 64": "--seq-length 64 has no effect: rows are as long as their longest response",
    "--rl-use-sequence-packing --max-tokens-per-gpu 64 --seq-length 48": "--seq-length 48 has no effect",
    "--moe-token-dispatcher-type flex": "needs experts that are shared out",
}


@pytest.mark.parametrize("flags", WITHOUT_EFFECT)
def test_a_flag_that_would_do_nothing_is_refused_in_one_line(flags):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(flags.split())
    message = str(caught.value)
    assert WITHOUT_EFFECT[flags] in message, message
    assert "\n" not in message and len(message) < 400


def test_flags_of_experts_and_of_held_out_problems_need_them(tmp_path):
    config = json.loads((assets.bundled_model_dir() / "config.json").read_text())
    dense = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | dense))
    base = ["--hf-model", str(tmp_path), "--train-prompts", str(assets.bundled_train_prompts())]
    base += ["--max-prompt-tokens", "16", "--max-response-tokens", "8"]
    parse_arguments(base)
    parse_arguments([*base, "--apply-wd-to-qk-layernorm"])
    for flags, message in {
        "--moe-z-loss-coeff 0.1": "without a model that has experts",
        "--moe-token-dispatcher-type allgather": "without a model that has experts",
        "--num-experts 8": "contradicts the model in --hf-model, which has None",
        "--moe-router-topk 2": "has no effect on the model in --hf-model",
        "--expert-tensor-parallel-size 1": "without a model that has experts",
        "--eval-interval 1": "without held-out problems",
        "--rl-prompts-per-eval 4": "without held-out problems",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parse_arguments([*base, *flags.split()])


# What Megatron's own script for such a model would say, besides data and tokenizer.
EQUAL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --kv-channels 16 --vocab-size 53 --max-position-embeddings 1024 --position-embedding-type "
    "rope --no-position-embedding --rotary-base 10000 --rotary-percent 1.0 --normalization RMSNorm --norm-epsilon "
    "1e-6 --swiglu --disable-bias-linear --qk-layernorm --untie-embeddings-and-output-weights --attention-dropout "
    "0.0 --hidden-dropout 0 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --use-mcore-models "
    "--no-one-logger --seq-length 24 --transformer-impl local --optimizer adam --ckpt-format torch_dist --log-interval "
    "1 --moe-router-load-balancing-type none --moe-router-dtype fp32 --accumulate-allreduce-grads-in-fp32"
)


def test_flags_that_say_what_is_so_are_let_through():
    parsed, bare = parse_arguments(EQUAL.split()), parse_arguments([])
    assert parsed.run == bare.run
    different = {name for name, value in vars(parsed.megatron).items() if value != getattr(bare.megatron, name)}
    # The last is so of float32 gradients in any case.
    assert different <= {"deprecated_use_mcore_models", "add_position_embedding", "accumulate_allreduce_grads_in_fp32"}


# What only Megatron's own checks, or the configurations that it makes of the flags, find wrong.
REFUSED_BY_MEGATRON = {
    "--recompute-granularity selective --recompute-modules nonsense": "nonsense",
    "--moe-layer-freq [1": "cannot be read",
    "--clip-grad nan": "--clip-grad must be",
    "--adam-beta1 2": "--adam-beta1 must be",
    "--adam-eps -1": "--adam-eps must be",
    "--weight-decay -0.1": "--weight-decay must be",
    "--seed 4294967296": "--seed must be",
    "--loss-scale -8": "--loss-scale must be",
    "--lr-warmup-iters 100": "--lr-warmup-iters 100 must be below --lr-decay-iters, which is 80",
    "--lr-decay-style WSD": "needs --lr-wsd-decay-iters",
    "--lr-decay-style cosine --min-lr 1": "--min-lr 1.0 is above --lr",
    "--lr-warmup-iters 2 --lr-warmup-init 1": "--lr-warmup-init 1.0 is above --lr",
    "--weight-decay-incr-style linear": "needs --start-weight-decay",
    "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1": "not below it",
    "--lr-warmup-iters 2 --lr-warmup-fraction 0.1": "lr-warmup",
    "--exit-interval 3": "--exit-interval 3 (optimizer steps) is not a multiple",
    "--save-interval 4 --save-retain-interval 6": "not a multiple of --save-interval 4",
    "--exit-duration-in-mins 0": "--exit-duration-in-mins must be at least 1",
    "--load x --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler": "use-checkpoint",
    "--overlap-grad-reduce --ddp-num-buckets 2 --ddp-bucket-size 9": "num_buckets",
}


@pytest.mark.parametrize("flags", REFUSED_BY_MEGATRON)
def test_what_megatron_would_stumble_over_later_is_told_before_any_work(flags):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(flags.split())
    message = str(caught.value)
    assert REFUSED_BY_MEGATRON[flags] in message, message
    assert len(message) < 500


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


@pytest.mark.parametrize("flag", ["--recompute-granularity selective", "--recompute-activations"])
def test_selective_recomputation_is_of_the_attention_core_by_default(flag):
    args = parse_arguments(flag.split()).megatron
    assert (args.recompute_granularity, args.recompute_modules) == ("selective", ["core_attn"])
