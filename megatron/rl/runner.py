"""Builds the parts of a run from the command line and hands them to the trainer. Cheap checks come first."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.rl import checkpoint, patience, places, setup, start_up
from megatron.rl.arguments import ParsedArguments, parse_arguments
from megatron.rl.collector import Collector
from megatron.rl.config import RunConfig
from megatron.rl.data import MicroBatcher, PromptSampler
from megatron.rl.engines import open_engine, pad_id
from megatron.rl.errors import ConfigError
from megatron.rl.objectives import Objective, get_objective
from megatron.rl.policy.learner import HeadSettings, Learner
from megatron.rl.reporting import Reporter
from megatron.rl.rewards import Scorer, make_scorer
from megatron.rl.run_log import EXPORT_FOLDER
from megatron.rl.run_prompts import RunPrompts, check_answers, read_prompts
from megatron.rl.stopping import Stop
from megatron.rl.trainer import Parts, Progress, Trainer
from megatron.rl.weights import (
    check_hf_weights,
    export_hf_weights,
    load_hf_weights,
    save_hf_checkpoint,
)

_PREFLIGHT_PROMPTS = 16


def run(argv: list[str]) -> None:
    """The whole program. Raises :class:`megatron.rl.errors.UserError` for a user's mistake."""
    parsed = parse_arguments(argv)
    config = parsed.run
    check_hf_weights(config.hf_model, hf_config=parsed.hf_config)
    start = checkpoint.read_start(parsed.megatron, config.trainer)
    places.check(parsed, start)
    tokenizer = load_tokenizer(config.hf_model)
    files = read_prompts(parsed, tokenizer)
    with make_scorer(config.reward) as scorer:
        setup.initialize(parsed.megatron, patience.meet(parsed.megatron.rank, parsed.megatron.world_size))
        try:
            patient = patience.patient_group()
            prompts = check_answers(parsed, files, scorer, patient)
            _train(parsed, start, tokenizer, scorer, prompts, patient)
        finally:
            torch.distributed.destroy_process_group()


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a Hugging Face folder. Raises :class:`ConfigError` where it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file raises whatever its content leads to
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"--hf-model {folder}: its tokenizer cannot be loaded: {reason}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what transformers makes of a folder without one
        raise ConfigError(f"--hf-model {folder}: no tokenizer there (tokenizer.json); copy it from the model's source")
    return tokenizer


def _train(
    parsed: ParsedArguments,
    start: checkpoint.Start,
    tokenizer: Any,
    scorer: Scorer,
    prompts: RunPrompts,
    patient: ProcessGroup,
) -> None:
    args, config, hf_config = parsed.megatron, parsed.run, parsed.hf_config
    policy = setup.build_policy(args, config)
    progress = Progress(start.step, start.iteration, saved=start.iteration if start.goes_on else None)
    sampler = PromptSampler(prompts.train, config.trainer.seed)
    if start.prompts is not None:
        sampler.load_state_dict(start.prompts)
    if args.load:
        checkpoint.load_checkpoint(args, policy)
    else:
        groups = policy.groups
        patience.on_all_ranks(
            lambda: load_hf_weights(policy.chunks, config.hf_model, hf_config=hf_config, pg_collection=groups), patient
        )
        policy.optimizer.reload_model_params()
    export_dir = os.path.join(config.trainer.run_dir, EXPORT_FOLDER)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        return export_hf_weights(policy.chunks, hf_config=hf_config, pg_collection=policy.groups)

    def save_checkpoint() -> None:
        state = replace(start, iteration=progress.iteration, step=progress.step, prompts=sampler.state_dict())
        checkpoint.save_checkpoint(args, policy, state)

    rows, notes = start_up.describe(parsed, start, policy, prompts.train, prompts.held_out)
    steps = config.trainer.steps_in_all(start.step, start.iteration)
    with (
        places.held(parsed, start, patient) as done,
        open_engine(parsed, tokenizer, policy.device, start.step, patient) as engine,
        Reporter(config, policy.groups, policy.device, steps, start.step or None) as reporter,
    ):
        reporter.start(rows, [*prompts.notes, *notes, *done])
        parts = Parts(
            learner=Learner(
                policy.chunks,
                policy.optimizer,
                policy.scheduler,
                policy.config,
                policy.groups,
                HeadSettings(
                    vocab_size=policy.vocab_size,
                    temperature=config.sampling.temperature,
                    objective=_objective(config),
                    entropy_coeff=config.trainer.entropy_coeff,
                    token_chunk=config.trainer.token_chunk,
                ),
            ),
            engine=engine,
            collector=Collector(
                engine, scorer, tokenizer, seed=config.trainer.seed, group=torch.distributed.group.WORLD
            ),
            prompts=sampler,
            preflight_prompts=prompts.train[:_PREFLIGHT_PROMPTS],
            eval_prompts=prompts.held_out[: config.trainer.eval_prompts] if prompts.held_out is not None else (),
            reporter=reporter,
            export_weights=export,
            save_checkpoint=save_checkpoint,
            export_folder=lambda: save_hf_checkpoint(export_dir, export(), source_dir=config.hf_model, group=patient),
            saved=(("Megatron checkpoint", args.save), ("Hugging Face export", export_dir)),
            groups=policy.groups,
            micro_batches=_micro_batcher(config, policy, pad_id(tokenizer)),
            stop=Stop(args),
        )
        Trainer(config, parts, progress).train()


def _micro_batcher(config: RunConfig, policy: setup.Policy, pad_id: int) -> MicroBatcher:
    dp, cp = policy.groups.dp, policy.groups.cp
    return MicroBatcher(
        config.batching,
        dp_rank=dp.rank(),
        dp_size=dp.size(),
        cp_rank=cp.rank(),
        cp_size=cp.size(),
        pad_id=pad_id,
        device=policy.device,
    )


def _objective(config: RunConfig) -> Objective:
    objective = config.objective
    return get_objective(
        objective.name,
        delta=objective.delta,
        eps=objective.eps,
        eps_low=objective.eps_low,
        eps_high=objective.eps_high,
        advantage_weight=objective.advantage_weight,
    )
