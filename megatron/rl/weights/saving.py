"""Writes exported tensors as a Hugging Face checkpoint folder that ``transformers`` loads."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron.rl.errors import CheckpointError
from megatron.rl.weights.hf_files import INDEX_FILE, SINGLE_FILE

_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
)


def save_hf_checkpoint(
    out_dir: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    source_dir: str | Path,
    max_shard_bytes: int = 5_000_000_000,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Rank 0 writes ``out_dir``; it appears whole or not at all. Collective: all ranks iterate ``tensors`` to its end.

    Args:
        out_dir: replaced if it already is a checkpoint folder with weights in safetensors.
        tensors: hub-named tensors, as ``export_hf_weights`` yields them.
        source_dir: the folder the model came from: its config.json (with the tensors' dtype), generation settings
            and tokenizer are taken over.
        max_shard_bytes: rank 0 holds at most this much before it writes a file (one tensor may exceed it).
        group: the ranks that take part, whose rank 0 writes; None is torch's default group, or this process alone
            where torch.distributed is not in use.

    Raises:
        CheckpointError: on every rank, where the folder cannot be written or holds something else, or ``source_dir``
            has no config.json.
    """
    out, source = Path(out_dir), Path(source_dir)
    is_writer = not dist.is_initialized() or dist.get_rank(group) == 0
    _raise_on_all(_refusal(out, source) if is_writer else None, group)
    stream = iter(tensors)
    failure = None
    if is_writer:
        try:
            _write(out, stream, source, max_shard_bytes)
        except (OSError, SafetensorError) as error:
            failure = f"{out}: cannot be written ({error}); free space or choose another folder"
    for _ in stream:  # making the tensors is collective, so every rank goes on to the end
        pass
    _raise_on_all(failure, group)


def _raise_on_all(failure: str | None, group: dist.ProcessGroup | None) -> None:
    box = [failure]
    if dist.is_initialized():
        dist.broadcast_object_list(box, group=group, group_src=0)
    if box[0] is not None:
        raise CheckpointError(box[0])


def _refusal(out: Path, source: Path) -> str | None:
    if not (source / "config.json").is_file():
        return f"{source}: no config.json to take over; name the folder that the model came from"
    if out.resolve() == source.resolve():
        return f"{out}: is the model's own source; export to another folder"
    is_checkpoint = (out / "config.json").is_file() and any(
        (out / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)
    )
    if out.exists() and not is_checkpoint and not (out.is_dir() and not any(out.iterdir())):
        return f"{out}: exists and is no Hugging Face checkpoint; choose another folder"
    return None


def _write(out: Path, tensors: Iterable[tuple[str, torch.Tensor]], source: Path, max_shard_bytes: int) -> None:
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    partial.mkdir(parents=True)
    try:
        dtype = _write_tensors(partial, tensors, max_shard_bytes)
        _write_config(partial, source, dtype)
        for pattern in _COPIED:
            for path in sorted(source.glob(pattern)):
                if path.is_file():
                    target = partial / path.relative_to(source)
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, target)
        _replace(out, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Writes the shards and, if there is more than one, their index. Returns a dtype that holds all tensors exactly."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0
    dtype: torch.dtype | None = None

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtype = tensor.dtype if dtype is None else torch.promote_types(dtype, tensor.dtype)
    flush()
    if dtype is None:
        raise ValueError("there are no tensors to save")
    _name_shards(folder, shards, total_bytes)
    return dtype


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (folder / "0").rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / str(number)).rename(folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2))


def _write_config(folder: Path, source: Path, dtype: torch.dtype) -> None:
    """The source's config.json with the dtype of the tensors: ``transformers`` loads in the dtype that it names."""
    config = json.loads((source / "config.json").read_text())
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]
    config.update(dict.fromkeys(names, str(dtype).removeprefix("torch.")))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _replace(out: Path, partial: Path) -> None:
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)
