"""One table per model family maps Megatron's sharded parameters to Hugging Face tensors, in both directions."""

from megatron.rl.weights.exporting import export_hf_weights, exported_sizes
from megatron.rl.weights.hf_config import megatron_arguments_from_hf
from megatron.rl.weights.hf_folder import read_eos_token_ids, read_hf_config
from megatron.rl.weights.hf_model import load_into_hf_model
from megatron.rl.weights.importing import check_hf_weights, load_hf_weights
from megatron.rl.weights.saving import save_hf_checkpoint

__all__ = [
    "check_hf_weights",
    "export_hf_weights",
    "exported_sizes",
    "load_hf_weights",
    "load_into_hf_model",
    "megatron_arguments_from_hf",
    "read_eos_token_ids",
    "read_hf_config",
    "save_hf_checkpoint",
]
