"""Reads what a Hugging Face folder says of its model, as ``transformers`` reads it."""

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.rl.errors import ConfigError
from megatron.rl.weights.hf_config import check_model_type, megatron_arguments_from_hf

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Keys that send transformers to other files, make layers differ, or go before what the engine asks for.
_REFUSED_KEYS = {
    "configuration_files": "keep one config.json",
    "transformers_weights": "keep the weights in model.safetensors, or in shards with their index",
    "per_layer_config": "all layers must be alike",
    "_attn_implementation": "leave it out",
    "_experts_implementation": "leave it out",
}
_ADAPTER = "adapter_config.json"


def read_hf_config(folder: str | Path) -> "PretrainedConfig":
    """The configuration that ``transformers`` makes of a folder's config.json, of a model that can be trained here.

    It is the only reading of that file: precedence of keys and defaults are those of the installed ``transformers``,
    with which the rollout engine loads the same folder. No code of the checkpoint is run.

    Raises:
        ConfigError: no config.json, one that ``transformers`` refuses or cannot build a model from, or a setting that
            :func:`megatron.rl.weights.hf_config.megatron_arguments_from_hf` refuses.
    """
    from transformers import AutoConfig

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"--hf-model {folder}: no config.json there; name a Hugging Face checkpoint folder")
    _check_keys(path, _read_json(path))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.standardize_rope_params()  # as the model does once more; by now all keys are attributes
    except Exception as error:  # what transformers raises of a key is its answer to it, whatever the class
        raise ConfigError(f"{path}: transformers refuses it: {_one_line(error)}") from error
    megatron_arguments_from_hf(config)
    _check_model(path, config)
    return config


def read_eos_token_ids(folder: str | Path) -> list[int]:
    """The tokens at which ``transformers`` ends a response: those of generation_config.json, without it config.json's.

    Empty where the file that decides names none.

    Raises:
        ConfigError: a generation_config.json that ``transformers`` cannot use, or tokens that are no whole numbers.
    """
    from transformers import GenerationConfig

    path = Path(folder) / "generation_config.json"
    if path.is_file():
        _read_json(path)  # a broken file is passed over by transformers; here it is told
        try:
            found = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
        except Exception as error:  # what transformers raises of a key is its answer to it, whatever the class
            raise ConfigError(f"{path}: transformers refuses it: {_one_line(error)}") from error
    else:
        path = Path(folder) / "config.json"
        found = _read_json(path).get("eos_token_id")  # the file's own: defaults of the class do not count here
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise ConfigError(f"{path}: eos_token_id must be a token id or a list of them (got {found!r})")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); download the checkpoint again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object; download the checkpoint again")
    return config


def _check_keys(path: Path, keys: dict[str, Any]) -> None:
    # Asked of the file itself: without the key, transformers guesses a type from the folder's name.
    check_model_type(keys.get("model_type"), str(path))
    for name, need in _REFUSED_KEYS.items():
        if keys.get(name) is not None:
            raise ConfigError(f"{path}: {name} {keys[name]!r} is not supported; {need}")
    if (path.parent / _ADAPTER).is_file():
        raise ConfigError(
            f"{path.parent / _ADAPTER}: transformers loads the base model that it names; merge the adapter into the "
            "model's weights, or remove the file"
        )


def _check_model(path: Path, config: "PretrainedConfig") -> None:
    """Builds the model without memory for it: what transformers cannot build is told here, not by the engine."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):  # an attention that the file asks for is not the engine's either
            AutoModelForCausalLM.from_config(
                copy.deepcopy(config), attn_implementation="eager", trust_remote_code=False
            )
    except Exception as error:  # as above
        raise ConfigError(f"{path}: transformers cannot build a model from it: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
