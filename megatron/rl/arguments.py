"""The command line: Megatron's own parser plus one group, resolved into frozen configurations.

This module and its sibling ``argument_checks`` are the only readers of Megatron's argument namespace;
everything below is given a config. The order of precedence: an explicit flag, then the Hugging Face
checkpoint (the bundled model where none is named), then the defaults below.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.rl import argument_checks, assets
from megatron.rl.argument_batching import batching_config, fill_token_budget, total_multiple
from megatron.rl.argument_group import add_rl_arguments
from megatron.rl.config import (
    AdvantageConfig,
    BatchingConfig,
    DataConfig,
    LossNormalizationConfig,
    ObjectiveConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from megatron.rl.cpu_platform import is_cpu_platform
from megatron.rl.errors import ConfigError
from megatron.rl.flags import GivenFlag, check_given, given_flags, refuse_unsupported, with_honest_help
from megatron.rl.run_log import CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER
from megatron.rl.weights import megatron_arguments_from_hf, read_hf_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# What Megatron's flags default to in this program. Its own defaults describe pre-training.
_DEFAULTS: dict[str, Any] = {
    "grpo_group_size": 8,
    "grpo_prompts_per_step": 64,
    "grpo_iterations": 1,
    "grpo_clamp_eps_lower": 0.2,
    "grpo_clamp_eps_upper": 0.28,
    "grpo_kl_beta": 0.0,
    "lr": 1e-6,
    "lr_decay_style": "constant",
    "train_iters": 200,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "fp8_recipe": "tensorwise",
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "use_distributed_optimizer": True,
    "log_interval": 1,
    "save_interval": None,
    "rl_prompts_per_eval": 64,
    "rl_sequence_packing_max_sequences_per_bin": None,
    "rerun_mode": "disabled",
    "ckpt_assume_constant_structure": True,
    "dist_ckpt_optim_fully_reshardable": True,  # a run may go on in another layout
    "enable_one_logger": False,  # it warns of a package that is not to be had
}
_GSPO_DEFAULTS = {"grpo_clamp_eps_lower": 3e-4, "grpo_clamp_eps_upper": 4e-4}  # a sequence's ratio moves far less
# Sizes at which the bundled model learns its problems in two minutes on two cores.
_BUNDLED_DEFAULTS: dict[str, Any] = {
    "grpo_group_size": 8,
    "grpo_prompts_per_step": 32,
    "lr": 3e-4,
    "rl_prompts_per_eval": 128,
}
_BUNDLED_MINI_BATCHES = 2
_BUNDLED_STEPS = 40
_BUNDLED_STEPS_BETWEEN_EVALUATIONS = 10
# Local layers exist without Transformer Engine and apex; their fusions do not.
_LOCAL_LAYERS: dict[str, Any] = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}


@dataclass(frozen=True)
class ParsedArguments:
    """Megatron's validated namespace, our config, the model's, and what Megatron printed while it validated."""

    megatron: argparse.Namespace
    run: RunConfig
    hf_config: "PretrainedConfig"
    megatron_log: str
    explicit: frozenset[str]  # destinations of the flags that were given


def parse_arguments(argv: list[str]) -> ParsedArguments:
    """Parses ``argv`` (without the program's name), fills in the model, and validates.

    Raises :class:`ConfigError` for every mistake, Megatron's assertions included.
    """
    from megatron.training import arguments as megatron_arguments

    given: list[GivenFlag] = []

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_rl_arguments(parser)
        parser.error = _fail  # type: ignore[method-assign, assignment]
        with_honest_help(parser)
        for action in parser._actions:
            action.help = _with_percent_signs_escaped(action.help)
        given.extend(_read_flags(parser, argv))
        refuse_unsupported(given)
        return parser

    saved, sys.argv = sys.argv, [sys.argv[0], *argv]
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log if "--help" not in argv and "-h" not in argv else sys.stdout):
            args = megatron_arguments.parse_args(provide)
            explicit = {flag.destination for flag in given}
            hf_config = _resolve(args, explicit)
            check_given(given, args, megatron_arguments_from_hf(hf_config))
            argument_checks.check_before_megatron(args, explicit)
            batching = batching_config(args)
            fp8 = _take_fp8_from_megatron(args)
            with _told_by_megatron():
                megatron_arguments.validate_args(args, {})
                args.variable_seq_lengths = _shapes_vary(args, batching)
                _rehearse(args)
    finally:
        sys.argv = saved
    run = _run_config(args, fp8, batching)
    argument_checks.check_run(run, hf_config)
    args.tensorboard_dir = None  # Megatron would open a writer of its own there
    return ParsedArguments(args, run, hf_config, log.getvalue(), frozenset(explicit))


def _fail(message: str) -> NoReturn:
    raise ConfigError(f"{message}; --help lists the flags")


def _with_percent_signs_escaped(text: str | None) -> str | None:
    """Some of Megatron's help texts hold a bare percent sign, at which argparse breaks."""
    return text if text is None else re.sub(r"%(?![(%])(?<!%%)", "%%", text)


def _read_flags(parser: argparse.ArgumentParser, argv: list[str]) -> list[GivenFlag]:
    try:
        return given_flags(parser, argv)
    except (AssertionError, KeyError, SyntaxError, NameError) as error:  # by functions of Megatron's that read a value
        raise ConfigError(f"a value of a flag cannot be read ({error!r}); --help lists the flags") from error


def _resolve(args: argparse.Namespace, explicit: set[str]) -> "PretrainedConfig":
    """Fills every flag that was not given, in order of precedence. Returns the Hugging Face config."""

    def fill(values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in explicit:
                setattr(args, name, value)

    bundled = args.hf_model is None
    args.hf_model = str(assets.bundled_model_dir()) if bundled else args.hf_model
    hf_config = read_hf_config(args.hf_model)
    fill(_DEFAULTS)
    if args.loss == "gspo":
        fill(_GSPO_DEFAULTS)
    if "use_checkpoint_opt_param_scheduler" not in explicit:
        fill({"override_opt_param_scheduler": True})  # a resumed run may be longer than it was meant to be
    if bundled:
        fill(_BUNDLED_DEFAULTS)
    fill(megatron_arguments_from_hf(hf_config))
    # A run may go on for longer, or at another rate, than its checkpoint was meant to.
    fill({"override_opt_param_scheduler": not args.use_checkpoint_opt_param_scheduler})
    fill({"max_prompt_tokens": 16 if bundled else 2048, "max_response_tokens": 8 if bundled else 8192})
    if args.train_prompts is None and bundled:
        fill({"train_prompts": str(assets.bundled_train_prompts()), "eval_prompts": str(assets.bundled_eval_prompts())})
    if is_cpu_platform():
        fill({"distributed_backend": "gloo"})
        if args.num_experts and (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) > 1:
            fill({"moe_token_dispatcher_type": "allgather"})  # gloo has no uneven all-gather, which all-to-all needs
    if not _has_transformer_engine():
        fill(_LOCAL_LAYERS)
    if not args.num_experts:
        args.moe_token_dispatcher_type = "alltoall"  # Megatron holds dense models, too, to the other ones' limits
    if args.num_experts and args.tensor_model_parallel_size > 1:
        args.sequence_parallel = True  # Megatron trains experts under tensor parallelism only so; the start-up says it
    if not args.check_for_nan_in_loss_and_grad:
        fill({"loss_scale": 1.0})  # a loss scale, be it 1, makes Megatron skip an update that is not finite
    if args.recompute_activations:
        args.recompute_granularity = "selective"  # as Megatron reads it
    if args.recompute_granularity == "full":
        fill({"recompute_method": "uniform", "recompute_num_layers": 1})
    if args.recompute_granularity == "selective" and args.recompute_modules is None:
        args.recompute_modules = ["core_attn"]
    argument_checks.check_sizes(args)
    _fill_sizes(args, explicit, bundled)
    return hf_config


def _fill_sizes(args: argparse.Namespace, explicit: set[str], bundled: bool) -> None:
    batch = args.grpo_prompts_per_step * args.grpo_group_size
    if "global_batch_size" not in explicit:
        args.global_batch_size = batch // _BUNDLED_MINI_BATCHES if bundled and batch % 2 == 0 else batch
    per_step = max(1, batch * args.grpo_iterations // args.global_batch_size)
    if "train_iters" not in explicit and bundled:
        args.train_iters = _BUNDLED_STEPS * per_step
    if "eval_interval" not in explicit:
        args.eval_interval = (_BUNDLED_STEPS_BETWEEN_EVALUATIONS if bundled else 20) * per_step
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    per_rank = args.global_batch_size // max(1, args.world_size // model_ranks)
    if "micro_batch_size" not in explicit:
        limit = per_rank if bundled else min(8, per_rank)
        args.micro_batch_size = next((n for n in range(limit, 0, -1) if per_rank % n == 0), 1)
    if "seq_length" not in explicit:
        multiple = total_multiple(args)
        args.seq_length = -(-(args.max_prompt_tokens + args.max_response_tokens) // multiple) * multiple
    if "max_position_embeddings" not in explicit:
        args.max_position_embeddings = max(args.max_position_embeddings or 0, args.seq_length)
    fill_token_budget(args, explicit)
    if args.save is None:
        args.save = os.path.join(args.run_dir, CHECKPOINTS_FOLDER)
    if args.save_interval is None:
        args.save_interval = args.train_iters
    args.num_workers = 0
    args.exit_on_missing_checkpoint = True


def _has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE and not is_cpu_platform()


def _take_fp8_from_megatron(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """FP8 flags; where they are emulated, Megatron is not told, since it would ask for Transformer Engine."""
    fp8 = (args.fp8, args.fp8_recipe if args.fp8 else None)
    if args.transformer_impl == "local":
        args.fp8 = None
    return fp8


@contextlib.contextmanager
def _told_by_megatron() -> Iterator[None]:
    """What Megatron finds wrong with the flags is a user's mistake."""
    try:
        yield
    except AssertionError as error:
        raise ConfigError(f"Megatron refuses the flags: {error or _failed_assertion(error)}") from error
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ConfigError(f"Megatron refuses the flags: {error}") from error


def _rehearse(args: argparse.Namespace) -> None:
    """Makes the configurations that Megatron will make of the flags, so that what it finds is told before any work."""
    from megatron.training import global_vars, training
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(args)
    training.get_megatron_optimizer_config(args)
    training.get_megatron_ddp_config(args)
    lr_decay_iters = args.lr_decay_iters
    global_vars.set_args(args)
    try:
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    finally:
        global_vars.set_args(None)
        args.lr_decay_iters = lr_decay_iters


def _shapes_vary(args: argparse.Namespace, batching: BatchingConfig) -> bool:
    """Whether pipeline stages must tell each other the shapes of what they send."""
    return args.pipeline_model_parallel_size > 1 and batching.token_budget is not None and not batching.uniform


def _failed_assertion(error: AssertionError) -> str:
    import traceback

    return (traceback.extract_tb(error.__traceback__)[-1].line or "").removeprefix("assert ")


def _run_config(args: argparse.Namespace, fp8: tuple[str | None, str | None], batching: BatchingConfig) -> RunConfig:
    return RunConfig(
        objective=ObjectiveConfig(
            name=args.loss,
            delta=args.loss_delta,
            eps=args.loss_eps,
            eps_low=args.grpo_clamp_eps_lower,
            eps_high=args.grpo_clamp_eps_upper,
            advantage_weight=args.loss_advantage_weight,
        ),
        sampling=SamplingConfig(
            max_new_tokens=args.max_response_tokens,
            temperature=args.rl_default_temperature,
            top_p=args.rl_default_top_p or 1.0,
            top_k=max(args.rl_default_top_k, 0),
        ),
        advantage=AdvantageConfig(
            args.advantage_std,
            args.advantage_leave_one_out,
            args.unscored_responses,
            args.grpo_filter_groups_with_same_reward,
        ),
        normalization=LossNormalizationConfig(
            args.loss_normalization, args.loss_horizon if args.loss_horizon is not None else args.max_response_tokens
        ),
        reward=RewardConfig(args.reward, args.reward_workers, args.reward_timeout),
        data=DataConfig(
            args.train_prompts,
            args.eval_prompts,
            args.max_prompt_tokens,
            args.max_response_tokens,
            args.overlong_prompts,
            args.unscorable_prompts,
            args.apply_chat_template,
        ),
        batching=batching,
        trainer=TrainerConfig(
            prompts_per_step=args.grpo_prompts_per_step,
            group_size=args.grpo_group_size,
            iterations=args.grpo_iterations,
            mini_batch_size=args.global_batch_size,
            train_iters=args.train_iters,
            seed=args.seed,
            eval_interval=args.eval_interval,
            save_interval=args.save_interval,
            eval_prompts=args.rl_prompts_per_eval,
            eval_samples=args.eval_samples,
            run_dir=os.path.abspath(args.run_dir),
            tensorboard_dir=os.path.abspath(args.tensorboard_dir or os.path.join(args.run_dir, TENSORBOARD_FOLDER)),
            entropy_coeff=args.grpo_entropy_term_weight,
            token_chunk=args.token_chunk,
        ),
        hf_model=args.hf_model,
        bf16=args.bf16,
        rollout=RolloutConfig(
            engine=args.rollout_engine,
            urls=tuple(filter(None, (args.rollout_url or "").split(","))),
            server_args=tuple(shlex.split(args.rollout_server_args or "")),
            sync_dir=args.weight_sync_dir,
        ),
        fp8_format=fp8[0],
        fp8_recipe=fp8[1],
    )
