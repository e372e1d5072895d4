"""The plan as a table in words."""

from collections.abc import Sequence

from megatron.rl.arguments import ParsedArguments
from memory_plan.plan import Stage, Target, largest_batch

_ROWS = (
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("optimizer states", "optimizer"),
    ("embedded engine", "engine"),
    ("its cache, sampling", "cache"),
    ("activations kept", "activations"),
    ("one layer's backward", "working"),
    ("loss path", "loss"),
    ("in all, at the peak", "total"),
    ("loss with plain logits", "plain_logits"),
    ("in all with those", "total_with_plain_logits"),
)


def size(count: float) -> str:
    """Bytes in a unit that fits, such as ``3.1 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def report(stages: Sequence[Stage], parsed: ParsedArguments, target: Target) -> str:
    """Lines to print: what is planned, a column for each pipeline stage, and whether it fits."""
    args = parsed.megatron
    batch = largest_batch(args, parsed.run)
    layers = (
        "megatron-core's local layers" if target.has_local_layers else "Transformer Engine's layers, not measured yet"
    )
    lines = [
        f"{parsed.run.hf_model}: {args.world_size} process(es), tensor {args.tensor_model_parallel_size}, pipeline "
        f"{args.pipeline_model_parallel_size}, context {args.context_parallel_size}, expert "
        f"{args.expert_model_parallel_size}, data {args.data_parallel_size}; {layers}",
        f"at most {batch.tokens:,} tokens of a micro-batch on a rank; micro-batches of a step: {batch.micro_batches}",
        "",
        _line("one rank of stage", [str(stage.number) for stage in stages]),
        _line("parameters", [f"{stage.counts.all:,}" for stage in stages]),
        *(_line(name, [size(getattr(stage, field)) for stage in stages]) for name, field in _ROWS),
        "",
        _verdict(stages, target),
    ]
    return "\n".join(lines)


def _line(name: str, values: Sequence[str]) -> str:
    return f"{name:<24}" + "".join(f"{value:>16}" for value in values)


def _verdict(stages: Sequence[Stage], target: Target) -> str:
    fullest = max(stages, key=lambda stage: stage.total)
    fits = "fits in" if fullest.total <= target.memory else "DOES NOT FIT in"
    return f"stage {fullest.number} takes most, {size(fullest.total)}: {fits} {size(target.memory)}"
