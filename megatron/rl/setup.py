"""From parsed arguments to a distributed policy with its optimizer: Megatron's own start-up, on any platform."""

import argparse
import logging
import os
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.rl import cpu_platform
from megatron.rl.config import RunConfig
from megatron.rl.fp8 import emulated_backend, fp8_config_from_flags
from megatron.rl.policy.local_layers import LocalLayersProvider
from megatron.rl.policy.model import ModelShape, build_gpt_model


@dataclass(frozen=True)
class Policy:
    """The trained model as this rank holds it, and what steps it."""

    chunks: list[torch.nn.Module]  # pipeline chunks, wrapped for data parallelism
    optimizer: Any
    scheduler: Any
    config: Any  # Megatron's TransformerConfig
    groups: ProcessGroupCollection
    vocab_size: int  # true size, without padding
    device: torch.device


def initialize(args: argparse.Namespace, store: torch.distributed.Store | None = None) -> None:
    """Starts torch.distributed, Megatron's process groups and random states.

    ``store``: where the ranks have met already; None has them meet by the environment's variables.
    """
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron.training import initialize as megatron_initialize
    from megatron.training.global_vars import set_global_variables

    logging.getLogger("megatron").setLevel(logging.WARNING)
    set_global_variables(args, build_tokenizer=False)
    initialize_rerun_state_machine(mode=RerunMode(args.rerun_mode))
    if args.world_size == 1:  # started without torchrun, a process meets nobody, on any free port
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    with cpu_platform.one_device_per_rank():
        megatron_initialize._initialize_distributed(None, None, store)
        megatron_initialize._set_random_seed(args.seed, args.data_parallel_random_init)


def build_policy(args: argparse.Namespace, run: RunConfig) -> Policy:
    """Builds model, optimizer and learning-rate schedule in the layout of ``args``; weights are not loaded."""
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.training import (
        get_megatron_optimizer_config,
        get_model,
        get_optimizer_param_scheduler,
    )

    groups = ProcessGroupCollection.use_mpu_process_groups()
    args.padded_vocab_size = _padded_vocab_size(args)
    shape = ModelShape(
        padded_vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )
    layers = _local_layers(args, run, groups)

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> GPTModel:
        return build_gpt_model(
            config or core_transformer_config_from_args(args),
            shape,
            local_layers=layers,
            pg_collection=pg_collection or groups,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )

    chunks = get_model(provide)
    config = get_model_config(chunks[0])
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(optimizer_config, chunks, config_overrides=overrides)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        _let_gradients_be_reduced_early(args, config, chunks)
    scheduler = get_optimizer_param_scheduler(optimizer)
    device = (
        torch.device("cpu") if cpu_platform.is_cpu_platform() else torch.device("cuda", torch.cuda.current_device())
    )
    return Policy(chunks, optimizer, scheduler, config, groups, args.vocab_size, device)


def _let_gradients_be_reduced_early(args: argparse.Namespace, config: Any, chunks: list[torch.nn.Module]) -> None:
    """Tells the schedule which micro-batch is the last, from whose backward pass on gradients are reduced."""

    def for_schedule(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    config.no_sync_func = for_schedule([chunk.no_sync for chunk in chunks])
    if args.align_grad_reduce:
        config.grad_sync_func = for_schedule([chunk.start_grad_sync for chunk in chunks])


def _local_layers(
    args: argparse.Namespace, run: RunConfig, groups: ProcessGroupCollection
) -> LocalLayersProvider | None:
    if args.transformer_impl != "local":
        return None
    if run.fp8_format is None or run.fp8_recipe is None:
        return LocalLayersProvider()
    fp8 = fp8_config_from_flags(run.fp8_format, run.fp8_recipe)
    return emulated_backend(LocalLayersProvider, fp8, amax_group=groups.dp_cp, expert_amax_group=groups.expt_dp)


def _padded_vocab_size(args: argparse.Namespace) -> int:
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    return calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )
