"""A small GPTModel with the same weights in every parallel layout, in emulated FP8 or without."""

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.rl import cpu_platform

cpu_platform.install()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron.rl.fp8 import Fp8Config, emulated_backend  # noqa: E402
from megatron.rl.policy.local_layers import LocalLayersProvider, local_block_spec  # noqa: E402

VOCAB = 64


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a job; sequence parallelism wherever there is tensor parallelism."""

    tp: int = 1
    ep: int = 1
    etp: int = 1

    def start(self) -> ProcessGroupCollection:
        """Megatron's process groups for this layout, replacing those of the layout before."""
        parallel_state.destroy_model_parallel()
        with cpu_platform.one_device_per_rank():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=self.tp,
                expert_model_parallel_size=self.ep,
                expert_tensor_parallel_size=self.etp,
            )
            model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        return ProcessGroupCollection.use_mpu_process_groups()


@contextlib.contextmanager
def alone() -> Iterator[ProcessGroupCollection]:
    """Process groups of this process alone."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Layout().start()
    finally:
        parallel_state.destroy_model_parallel()
        if ours:
            dist.destroy_process_group()


def transformer_config(layout: Layout | None = None, **changes: Any) -> TransformerConfig:
    """Two layers of hidden size 32 with 4 experts, unless ``changes`` say otherwise."""
    layout = layout or Layout()
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather" if layout.etp > 1 else "alltoall",
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.tp > 1,
        "params_dtype": torch.float32,
    }
    values.update(changes)
    return TransformerConfig(**values, bf16=values["params_dtype"] == torch.bfloat16)


def build(groups: ProcessGroupCollection, config: TransformerConfig, fp8: Fp8Config | None) -> GPTModel:
    """The model in emulated FP8, or without for None; its weights depend on their names alone."""
    provider = LocalLayersProvider()
    if fp8 is not None:
        provider = emulated_backend(LocalLayersProvider, fp8, amax_group=groups.dp_cp, expert_amax_group=groups.expt_dp)
    model = GPTModel(
        config=config,
        transformer_layer_spec=local_block_spec(config, provider),
        vocab_size=VOCAB,
        max_sequence_length=512,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = _whole(global_name(name, config, groups), parameter, groups)
            parameter.copy_(shard(whole, name, groups))
    return model


def log_probs(
    model: GPTModel, tokens: torch.Tensor, groups: ProcessGroupCollection
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [batch, sequence] of the next tokens (the last position's wraps around), and their sum."""
    positions = torch.arange(tokens.shape[1])[None].expand(len(tokens), -1)
    losses = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))
    return -losses.detach(), -losses.sum()


def shard(whole: torch.Tensor, name: str, groups: ProcessGroupCollection) -> torch.Tensor:
    """This rank's piece of the ``whole`` parameter called ``name``."""
    tp = groups.expt_tp if ".experts." in name else groups.tp
    return cut(whole, name, tp.size(), tp.rank())


def cut(whole: torch.Tensor, name: str, size: int, rank: int) -> torch.Tensor:
    """Piece ``rank`` of ``size`` of the ``whole`` parameter called ``name``."""
    dim = _cut_dim(name)
    if dim is None:
        return whole
    if "linear_fc1" in name:  # gate and up, each cut
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim=dim)[rank]


def global_name(name: str, config: TransformerConfig, groups: ProcessGroupCollection) -> str:
    """A parameter's name with the expert's number in the whole model."""
    if ".local_experts." not in name:
        return name
    head, tail = name.split(".local_experts.")
    number, rest = tail.split(".", 1)
    assert config.num_moe_experts is not None
    first = config.num_moe_experts // groups.ep.size() * groups.ep.rank()
    return f"{head}.local_experts.{int(number) + first}.{rest}"


def _cut_dim(name: str) -> int | None:
    if any(part in name for part in ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer")):
        return 0
    return 1 if "linear_proj" in name or "linear_fc2" in name else None


def _whole(name: str, parameter: torch.Tensor, groups: ProcessGroupCollection) -> torch.Tensor:
    shape = list(parameter.shape)
    dim = _cut_dim(name)
    if dim is not None:
        shape[dim] *= (groups.expt_tp if ".experts." in name else groups.tp).size()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:
        return 1 + 0.1 * torch.randn(shape, generator=generator)
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5
