"""Reads slices of the safetensors files of a Hugging Face checkpoint folder."""

import contextlib
import json
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from megatron.rl.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class HfCheckpoint:
    """The tensors of a folder that ``transformers`` would load from it; a context manager.

    They are those of ``model.safetensors`` if it is there, whatever index lies beside it, else all of the shards that
    the index names. Only the headers are read until :meth:`read` is called, and then only the slices it asks for.

    Raises:
        CheckpointError: no safetensors, a shard that is missing or damaged, a tensor that the index promises and
            its shard does not hold, or one that two shards hold.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}  # names that the file itself uses, where they are others
        self._open: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        index = self.folder / INDEX_FILE
        single = self.folder / SINGLE_FILE
        try:
            if single.is_file():
                self._files = dict.fromkeys(self._opened(single).keys(), single)
            elif index.is_file():
                self._read_index(index)
            else:
                raise CheckpointError(self._no_weights())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> AbstractSet[str]:
        """The names of all tensors."""
        return self._files.keys()

    def rename(self, stored: str, name: str) -> None:
        """Lets the tensor that the file calls ``stored`` be known as ``name``, which no tensor has yet."""
        self._files[name] = self._files.pop(stored)
        self._stored[name] = stored

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """``length`` slices of a tensor along ``dim``, from ``start`` on, in the dtype of the file."""
        window = (slice(None),) * dim + (slice(start, start + length),)
        return self._slice(name)[window]

    def _slice(self, name: str) -> Any:
        return self._opened(self._files[name]).get_slice(self._stored.get(name, name))

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged ({error}); download or export it again") from None
        return self._open[path]

    def _no_weights(self) -> str:
        pickled = next((name for name in _PICKLED if (self.folder / name).is_file()), None)
        if pickled is None:
            return f"{self.folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; weights must be in safetensors"
        return (
            f"{self.folder / pickled}: weights must be in safetensors; convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
        )

    def _read_index(self, index: Path) -> None:
        weight_map = _weight_map(index)
        for path in sorted({self.folder / file for file in weight_map.values()}):
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, though {INDEX_FILE} lists it; download or export it again")
            for name in sorted(self._opened(path).keys()):
                if name in self._files:
                    raise CheckpointError(
                        f"{path}: {name} is in {self._files[name].name} too, and the two may differ; leave it in one"
                    )
                self._files[name] = path
        for name, file in weight_map.items():
            if self._files.get(name) != self.folder / file:
                raise CheckpointError(
                    f"{self.folder / file}: {name} is not in it, though {INDEX_FILE} says so; download it again"
                )


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor to file name. What is refused, ``transformers`` cannot load either."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: not an index of safetensors; download or export it again")
    if not isinstance(content.get("metadata"), dict):
        raise CheckpointError(f'{index}: without "metadata", which transformers asks for; add "metadata": {{}} to it')
    return weight_map
