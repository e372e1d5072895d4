"""Bytes of one rank of each pipeline stage, from parsed arguments."""

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.rl.arguments import ParsedArguments
from megatron.rl.config import RunConfig
from megatron.rl.errors import ConfigError
from megatron.rl.ops.chunking import chosen_chunk_size
from megatron.rl.rollout.hf import MAX_BATCH_SIZE
from megatron.rl.weights.hf_config import dimensions_of
from memory_plan import parameters
from memory_plan.activations import LayerActivations
from memory_plan.parameters import Counts

_FP32 = 4
# What a chunk's logits take beside them while their gradients are made, per entry: measured by tools/benchmark_loss.py.
_LOSS_BYTES = {2: 4.3, 4: 4.1}
# megatron-core's vocabulary-parallel cross entropy keeps its float32 softmax: measured with bfloat16 logits.
_PLAIN_LOGITS_BYTES = {2: 6.25, 4: 8.25}


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage; all in bytes but the counts."""

    number: int
    counts: Counts
    weights: float
    gradients: float
    optimizer: float
    engine: float  # the embedded engine's copy of the whole model
    cache: float  # its keys and values, while responses are sampled and nothing is trained
    activations: float  # kept for the backward pass, of all micro-batches in flight
    working: float  # of the layer whose backward pass runs
    loss: float  # the loss path beyond its inputs and the two gradients
    plain_logits: float  # what the loss would take with logits kept, instead of ``loss``

    @property
    def total(self) -> float:
        """At the fullest moment, of training or of sampling."""
        return self._standing + max(self.activations + self._transient, self.cache)

    @property
    def total_with_plain_logits(self) -> float:
        """The same with the logits kept."""
        return self._standing + max(self.activations + max(self.working, self.plain_logits), self.cache)

    @property
    def _standing(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.engine

    @property
    def _transient(self) -> float:
        """The loss path has given its memory back when the layers' backward passes start."""
        return max(self.working, self.loss)


@dataclass(frozen=True)
class Batch:
    """The largest micro-batch of the run, and how many there are."""

    tokens: int  # of one rank, its context-parallel share
    rows: int  # sequences side by side
    micro_batches: int  # of one rank in an optimizer step, at most


@dataclass(frozen=True)
class Target:
    """The machine planned for."""

    device: str  # "cuda" or "cpu"
    memory: int  # bytes of one device

    @property
    def has_local_layers(self) -> bool:
        """On GPUs Transformer Engine's layers are assumed."""
        return self.device == "cpu"


def plan(parsed: ParsedArguments, target: Target) -> list[Stage]:
    """Every pipeline stage of the run that the arguments describe.

    Raises :class:`ConfigError` for flags that change what a rank holds in a way that is not planned here.
    """
    args = parsed.megatron
    _refuse_unplanned(args)
    return [_stage(number, parsed, target) for number in range(args.pipeline_model_parallel_size)]


def _refuse_unplanned(args: argparse.Namespace) -> None:
    unplanned = {
        "--decoder-first-pipeline-num-layers": args.decoder_first_pipeline_num_layers is not None,
        "--decoder-last-pipeline-num-layers": args.decoder_last_pipeline_num_layers is not None,
        "--pipeline-model-parallel-layout": args.pipeline_model_parallel_layout is not None,
        "--account-for-embedding-in-pipeline-split": args.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": args.account_for_loss_in_pipeline_split,
        "--recompute-method block": args.recompute_granularity == "full" and args.recompute_method == "block",
        "--use-precision-aware-optimizer": args.use_precision_aware_optimizer,
    }
    for flag, given in unplanned.items():
        if given:
            raise ConfigError(f"{flag}: the plan does not know what it changes; leave it out for a plan without it")


def largest_batch(args: argparse.Namespace, run: RunConfig) -> Batch:
    """Every sequence as long as its limit allows."""
    cp, batching = args.context_parallel_size, run.batching
    longest = args.max_prompt_tokens + args.max_response_tokens
    longest = -(-longest // batching.total_multiple) * batching.total_multiple
    sequences = args.global_batch_size // args.data_parallel_size
    if batching.token_budget is None:
        rows = batching.micro_batch_size
        return Batch(rows * longest // cp, rows, -(-sequences // rows))
    fitting = max(1, batching.token_budget // longest)
    return Batch(batching.token_budget // cp, 1 if batching.packed else fitting, -(-sequences // fitting))


def _stage(number: int, parsed: ParsedArguments, target: Target) -> Stage:
    args, run, hf_config = parsed.megatron, parsed.run, parsed.hf_config
    element = 2 if run.bf16 else _FP32
    counts = parameters.of_stage(number, args, hf_config, padded_vocab_size(args))
    batch = largest_batch(args, run)
    kept, working = _activations(number, args, hf_config, target, batch, element)
    is_last = number == args.pipeline_model_parallel_size - 1
    entries = batch.tokens * padded_vocab_size(args) / args.tensor_model_parallel_size
    gradient = _FP32 if args.accumulate_allreduce_grads_in_fp32 or not run.bf16 else element
    return Stage(
        number,
        counts,
        weights=counts.all * element,
        gradients=counts.all * gradient,
        optimizer=_optimizer(counts, args, run),
        engine=parameters.whole_model(hf_config) * element if run.rollout.engine == "hf" else 0.0,
        cache=_cache(args, run, element) if run.rollout.engine == "hf" else 0.0,
        activations=kept,
        working=working,
        loss=_loss(args, target, batch, element) if is_last else 0.0,
        plain_logits=_PLAIN_LOGITS_BYTES[element] * entries if is_last else 0.0,
    )


def padded_vocab_size(args: argparse.Namespace) -> int:
    """As Megatron pads it."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return -(-args.vocab_size // multiple) * multiple


def _optimizer(counts: Counts, args: argparse.Namespace, run: RunConfig) -> float:
    """Adam's two moments and, beside bfloat16 weights, a float32 copy; shared out over data-parallel ranks."""
    each = (3 if run.bf16 else 2) * _FP32
    if not args.use_distributed_optimizer:
        return counts.all * each
    model_ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert_ranks = etp * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    sharers, expert_sharers = args.world_size // model_ranks, args.world_size // expert_ranks
    return each * (counts.dense / sharers + counts.expert / expert_sharers)


def _activations(
    number: int, args: argparse.Namespace, hf_config: Any, target: Target, batch: Batch, element: int
) -> tuple[float, float]:
    """Kept of all micro-batches in flight, and what one layer's backward pass takes."""
    layers = parameters.layers_of_stage(number, args, dimensions_of(hf_config))
    stages = args.pipeline_model_parallel_size
    of_layer = LayerActivations(args, element, batch.rows, local=target.has_local_layers)
    present = [(moe, count) for moe, count in ((False, layers.dense), (True, layers.moe)) if count]
    stored = sum(count * of_layer.stored(moe=moe) for moe, count in present)
    if number == stages - 1:
        stored += of_layer.last_norm()
    working = max(of_layer.passing(moe=moe) for moe, _ in present)
    return stored * batch.tokens * in_flight(number, args, batch.micro_batches), working * batch.tokens


def in_flight(stage: int, args: argparse.Namespace, micro_batches: int) -> float:
    """Micro-batches of the whole stage whose activations are there at a time, by Megatron's schedules.

    One forward, one backward after a warm-up; interleaved, parts of a stage are warmed up one after another.
    """
    stages, chunks = args.pipeline_model_parallel_size, parameters.virtual_stages(args)
    if chunks == 1:
        return min(stages - stage, micro_batches)
    group = args.microbatch_group_size_per_vp_stage or stages
    warm_up = (stages - stage - 1) * 2 + (chunks - 1) * group
    return min(warm_up + 1, micro_batches * chunks) / chunks


def _cache(args: argparse.Namespace, run: RunConfig, element: int) -> float:
    """Of the responses that a process decodes at a time, all as long as they may be."""
    responses = run.trainer.prompts_per_step * run.trainer.group_size
    rows = min(MAX_BATCH_SIZE, -(-responses // args.world_size))
    per_token = 2 * args.num_layers * args.num_query_groups * args.kv_channels * element
    return rows * (args.max_prompt_tokens + args.max_response_tokens) * per_token


def _loss(args: argparse.Namespace, target: Target, batch: Batch, element: int) -> float:
    rows = padded_vocab_size(args) // args.tensor_model_parallel_size
    chunk = args.token_chunk or chosen_chunk_size(rows, args.hidden_size, element, target.memory, target.device)
    return _LOSS_BYTES[element] * min(chunk, batch.tokens) * rows
