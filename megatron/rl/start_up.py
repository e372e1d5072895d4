"""What a run is made of, in words: the table at its start, and what was chosen by itself."""

import os
from importlib.metadata import version
from typing import Any

import torch

from megatron.rl import cpu_platform, engines
from megatron.rl.arguments import ParsedArguments
from megatron.rl.checkpoint import Start
from megatron.rl.config import RunConfig
from megatron.rl.data import PromptSet
from megatron.rl.fp8 import count_emulated_linears, describe_emulation, fp8_config_from_flags
from megatron.rl.objectives import parameters_of
from megatron.rl.setup import Policy

Rows = list[tuple[str, str]]


def describe(
    parsed: ParsedArguments, start: Start, policy: Policy, train: PromptSet, held_out: PromptSet | None
) -> tuple[Rows, list[str]]:
    """Rows (name, value) of the start-up table, and one line for everything that nobody asked for by a flag."""
    args, run = parsed.megatron, parsed.run
    trainer = run.trainer
    steps = trainer.steps_in_all(start.step, start.iteration)
    parameters = sum(p.numel() for chunk in policy.chunks for p in chunk.parameters())
    rows = [
        ("model", f"{run.hf_model} ({parameters:,} parameters on this rank)"),
        ("platform", f"{_device()}, megatron-core {version('megatron-core')}, torch {torch.__version__}"),
        ("layout", _layout(args)),
        ("precision", _precision(parsed)),
        ("loss", _loss(run)),
        (
            "batch",
            f"{trainer.prompts_per_step} prompts x {trainer.group_size} responses a step, "
            f"{trainer.iterations_per_step} optimizer steps of {trainer.mini_batch_size} each; {steps} steps"
            + (f", {start.step} of them behind" if start.step else ""),
        ),
        ("micro-batches", _micro_batches(args, run)),
        ("optimizer", f"{args.optimizer}, learning rate {args.lr}"),
        ("prompts", _prompts(train, "train") + (", " + _prompts(held_out, "held out") if held_out else "")),
        ("reward", f"{run.reward.name}, {run.reward.workers} worker(s) a rank, {run.reward.timeout_s} s each"),
        (
            "engine",
            f"{engines.describe(parsed)}; temperature {run.sampling.temperature}, "
            + str(args.params_dtype).removeprefix("torch."),
        ),
        ("run folder", trainer.run_dir),
    ]
    return rows, _notes(parsed, policy, train, held_out)


def _device() -> str:
    return "CPU over gloo" if cpu_platform.is_cpu_platform() else torch.cuda.get_device_name()


def _layout(args: object) -> str:
    names = (
        ("data", "data_parallel_size"),
        ("tensor", "tensor_model_parallel_size"),
        ("pipeline", "pipeline_model_parallel_size"),
        ("context", "context_parallel_size"),
        ("expert", "expert_model_parallel_size"),
    )
    sizes = [f"{name} {getattr(args, attribute)}" for name, attribute in names]
    return f"{args.world_size} process(es): {', '.join(sizes)}"  # type: ignore[attr-defined]


def _micro_batches(args: Any, run: RunConfig) -> str:
    batching = run.batching
    if batching.token_budget is None:
        how = f"{batching.micro_batch_size} rows, padded to the longest response of the optimizer step"
    else:
        kind = "packed" if batching.packed else "rows of like length"
        how = f"{kind}, at most {args.max_tokens_per_gpu} tokens on one GPU"
    if args.recompute_granularity is None:
        return how
    what = ", ".join(args.recompute_modules) if args.recompute_granularity == "selective" else "everything"
    if args.recompute_granularity == "full" and args.recompute_method == "block":
        what = f"the first {args.recompute_num_layers} layers of each pipeline stage"
    return f"{how}; recomputed in the backward pass: {what}"


def _loss(run: RunConfig) -> str:
    """With the numbers that this one reads."""
    words = {"delta": "delta", "eps": "eps", "eps_low": "lower clip", "eps_high": "upper clip"}
    numbers = [f"{words[name]} {getattr(run.objective, name)}" for name in parameters_of(run.objective.name)]
    weight = [] if run.objective.advantage_weight else ["not weighted by abs(advantage)"]
    return ", ".join([run.objective.name, *numbers, *weight, run.normalization.mode])


def _precision(parsed: ParsedArguments) -> str:
    base = "bf16" if parsed.run.bf16 else "float32"
    if parsed.run.fp8_format is None:
        return base
    return f"FP8 {parsed.run.fp8_format} {parsed.run.fp8_recipe} over {base}"


def _prompts(prompts: PromptSet, use: str) -> str:
    return f"{len(prompts)} to {use} ({prompts.path})" if use == "train" else f"{len(prompts)} {use} ({prompts.path})"


def _notes(parsed: ParsedArguments, policy: Policy, train: PromptSet, held_out: PromptSet | None) -> list[str]:
    args, run = parsed.megatron, parsed.run
    notes = []
    if run.fp8_format is not None and args.transformer_impl == "local":
        fp8 = fp8_config_from_flags(run.fp8_format, run.fp8_recipe or "")
        notes.append(describe_emulation(fp8, count_emulated_linears(policy.chunks)))
    if args.transformer_impl == "local":
        where = "on a CPU" if cpu_platform.is_cpu_platform() else "without Transformer Engine"
        notes.append(f"the layers are megatron-core's local ones, {where}")
    if args.sequence_parallel:
        notes.append("sequence parallelism is on")
    for prompts in filter(None, (train, held_out)):
        if prompts.skipped:
            notes.append(f"{prompts.skipped} prompts of {prompts.path} are longer than the limit and are skipped")
        if prompts.unended:
            notes.append(
                f"{prompts.unended} prompts of {prompts.path} go without the special tokens that the tokenizer puts "
                "after a text: a response follows"
            )
    if args.load:
        notes.append(_what_goes_on(args))
    return notes


def _what_goes_on(args: Any) -> str:
    place = os.path.abspath(args.load)
    if args.finetune:
        return f"a new run starts from the weights in {place} (--finetune)"
    if args.no_load_optim:
        return f"weights and prompt order go on from {place}; the optimizer starts anew (--no-load-optim)"
    return f"weights, optimizer and prompt order go on from {place}"
