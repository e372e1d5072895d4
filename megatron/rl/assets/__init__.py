"""The bundled model and prompts: a tiny Qwen3-MoE that solves a third of its sums, and sums to solve.

All of it is made again, from a seed, by ``tools/make_tiny_model.py``.
"""

from pathlib import Path

from megatron.rl.errors import CheckpointError, DataError

_FOLDER = Path(__file__).resolve().parent


def bundled_model_dir() -> Path:
    """The folder of the bundled model in Hugging Face form (config.json, safetensors, tokenizer).

    Raises:
        CheckpointError: if the installation lacks it.
    """
    folder = _FOLDER / "tiny_qwen3_moe"
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(
            f"the bundled model is missing from {folder}: install the package again, "
            f"or run `python tools/make_tiny_model.py --out {_FOLDER}`"
        )
    return folder


def bundled_train_prompts() -> Path:
    """The bundled training prompts: JSONL with ``prompt``, ``answer`` and ``source``.

    Raises:
        DataError: if the installation lacks them.
    """
    return _prompt_file("arithmetic_train.jsonl")


def bundled_eval_prompts() -> Path:
    """The bundled held-out prompts, none of which the model was trained on; same form.

    Raises:
        DataError: if the installation lacks them.
    """
    return _prompt_file("arithmetic_eval.jsonl")


def _prompt_file(name: str) -> Path:
    path = _FOLDER / name
    if not path.is_file():
        raise DataError(
            f"the bundled prompts are missing ({path}): install the package again, "
            f"or run `python tools/make_tiny_model.py --out {_FOLDER}`"
        )
    return path
