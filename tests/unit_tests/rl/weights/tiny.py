"""Tiny random Hugging Face checkpoints, and Megatron models of the same shape in any parallel layout."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
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

from megatron.rl.policy.local_layers import LocalLayersProvider, local_block_spec  # noqa: E402
from megatron.rl.weights import megatron_arguments_from_hf  # noqa: E402
from megatron.rl.weights.hf_config import dimensions_of, family_of  # noqa: E402
from megatron.rl.weights.table import Fuse, units  # noqa: E402

VOCAB = 61  # prime: every tensor-parallel layout pads it
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS: dict[str, Any] = {
    "head_dim": 10,
    "moe_intermediate_size": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 10, "num_key_value_heads": 2}),
    "qwen3-tied-one-group": ("Qwen3Config", {"head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True}),
    "qwen3-moe-unnormalised": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "qwen3-moe-one-expert": ("Qwen3MoeConfig", {**_EXPERTS, "norm_topk_prob": False, "num_experts_per_tok": 1}),
}


def hf_config(name: str) -> Any:
    """The ``transformers`` configuration object of a checkpoint above."""
    import transformers

    class_name, changes = CHECKPOINTS[name]
    return getattr(transformers, class_name)(**{**_COMMON, **changes})


def hf_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random ``transformers`` model whose norms, biases and routers are far from their initial values."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hf_config(name), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def save_hf(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Writes a random checkpoint as ``transformers`` writes it; returns its model."""
    model = hf_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def read_json(folder: Path) -> dict[str, Any]:
    """config.json of a folder, as it stands there."""
    return json.loads((Path(folder) / "config.json").read_text())


def write_config(folder: Path, **changes: Any) -> Path:
    """Changes keys of a folder's config.json; ``...`` takes a key out."""
    config = {name: value for name, value in {**read_json(folder), **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(config: Any, **changes: Any) -> Any:
    """A copy of a configuration object with other values."""
    other = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def groups(tp: int = 1, ep: int = 1, etp: int = 1, tp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0) -> Any:
    """Process groups of one rank as far as an import needs them: sizes and ranks, and nothing to communicate."""

    def group(rank: int, size: int) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: rank, size=lambda: size)

    return SimpleNamespace(tp=group(tp_rank, tp), ep=group(ep_rank, ep), expt_tp=group(etp_rank, etp), pp=group(0, 1))


class StubChunk(torch.nn.Module):
    """Has the parameters of a whole single-stage model by name, and no forward pass."""

    pre_process = post_process = True

    def __init__(self, config: Any, layout: Any, *, transformer_engine: bool = False) -> None:
        super().__init__()
        family, dims = family_of(config), dimensions_of(config)
        self.config = SimpleNamespace(num_layers=len(dims.moe_layers))
        self.decoder = SimpleNamespace(
            layers=[SimpleNamespace(layer_number=layer + 1) for layer in range(len(dims.moe_layers))]
        )
        count = dims.experts // layout.ep.size()
        self.by_name: dict[str, torch.nn.Parameter] = {}
        for unit in units(family, dims):
            if not unit.row.exported or (unit.expert is not None and unit.expert // count != layout.ep.rank()):
                continue
            row, dim = unit.row, unit.row.shard.dim
            has_te_name = transformer_engine and not ("pre_mlp" in row.megatron[0] and dims.moe_layers[unit.layer])
            template = row.megatron[-1 if has_te_name else 0]
            name = template.format(layer=unit.layer, expert=unit.expert % count if unit.expert is not None else None)
            shape = list(dims.shape(row.hf[0]))
            shape[dim] = sum(dims.shape(tensor)[dim] for tensor in row.hf)
            if row.fuse is Fuse.PAD_VOCAB:
                shape[dim] = 64
            if row.shard.is_cut:
                shape[dim] //= (layout.expt_tp if row.shard.is_expert else layout.tp).size()
            self.by_name[name] = torch.nn.Parameter(torch.full(shape, torch.nan))

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(list(self.by_name.items()))


def initialize(
    tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None
) -> SimpleNamespace:
    """Megatron's process groups for a layout, replacing those of the layout before."""
    parallel_state.destroy_model_parallel()
    with cpu_platform.one_device_per_rank():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    return SimpleNamespace(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp or tp, groups=collection)


def padded_vocab(layout: SimpleNamespace) -> int:
    """Padded so far that a vocabulary of 61 needs it in every layout."""
    multiple = 3 * layout.tp
    return -(-VOCAB // multiple) * multiple


def build(
    config: Any,
    layout: SimpleNamespace,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> list[torch.nn.Module]:
    """The Megatron model chunks of this rank, in evaluation mode, with random weights."""
    arguments = {**megatron_arguments_from_hf(config), **changes}
    transformer_config = _transformer_config(arguments, layout, dtype)
    count = layout.vpp or 1
    stage, last = layout.groups.pp.rank(), layout.groups.pp.size() - 1
    chunks = []
    for chunk in range(count):
        vp_stage = chunk if layout.vpp else None
        model = GPTModel(
            config=transformer_config,
            transformer_layer_spec=local_block_spec(transformer_config, LocalLayersProvider(), vp_stage=vp_stage),
            vocab_size=padded_vocab(layout),
            max_sequence_length=128,
            pre_process=stage == 0 and chunk == 0,
            post_process=stage == last and chunk == count - 1,
            share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
            position_embedding_type=arguments["position_embedding_type"],
            rotary_percent=arguments["rotary_percent"],
            rotary_base=arguments["rotary_base"],
            rope_scaling=arguments["use_rope_scaling"],
            rope_scaling_factor=arguments.get("rope_scaling_factor", 1.0),
            pg_collection=layout.groups,
            vp_stage=vp_stage,
        )
        chunks.append(model.to(dtype).eval())
    return chunks


def _transformer_config(arguments: dict[str, Any], layout: SimpleNamespace, dtype: torch.dtype) -> TransformerConfig:
    """As ``core_transformer_config_from_args`` fills it, without the fusions that a CPU has not."""
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    return TransformerConfig(
        **{name: value for name, value in arguments.items() if name in names},
        num_moe_experts=arguments["num_experts"],
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.tp > 1 and arguments["num_experts"] is not None,
        # gloo gathers equal sizes only, and the all-to-all dispatcher gathers a rank's own count over ETP
        moe_token_dispatcher_type="allgather" if layout.etp > 1 else "alltoall",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


@torch.no_grad()
def log_probs(chunks: list[torch.nn.Module], tokens: torch.Tensor, layout: SimpleNamespace) -> torch.Tensor:
    """[batch, sequence, VOCAB] of the whole model, equal on all ranks. Stages hand over by broadcast."""
    batch, length = tokens.shape
    positions = torch.arange(length)[None].expand(batch, -1)
    config = chunks[0].config
    local_length = length // layout.tp if config.sequence_parallel else length
    hidden = torch.empty(local_length, batch, config.hidden_size, dtype=config.params_dtype)
    output = None
    for chunk in chunks:
        for stage in range(layout.pp):
            if stage == layout.groups.pp.rank():
                if not chunk.pre_process:
                    chunk.set_input_tensor(hidden)
                output = chunk(tokens, positions, None)
                hidden = hidden if chunk.post_process else output.contiguous()
            dist.broadcast(hidden, group=layout.groups.pp, group_src=stage)
    last = layout.groups.pp.size() - 1
    if layout.groups.pp.rank() != last:
        output = torch.empty(batch, length, padded_vocab(layout) // layout.tp, dtype=config.params_dtype)
    output = output.contiguous()
    dist.broadcast(output, group=layout.groups.pp, group_src=last)
    parts = [torch.empty_like(output) for _ in range(layout.tp)]
    dist.all_gather(parts, output, group=layout.groups.tp)
    return torch.cat(parts, dim=-1)[..., :VOCAB].float().log_softmax(-1)
