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


class HfCheckpoint:
    """The tensors of a folder with ``model.safetensors`` or with shards and their index; a context manager.

    Only the headers are read until :meth:`read` is called, and then only the slices it asks for.

    Raises:
        CheckpointError: no safetensors, a shard that is missing or damaged, a tensor that the index promises and
            its shard does not hold.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        index = self.folder / INDEX_FILE
        single = self.folder / SINGLE_FILE
        try:
            if index.is_file():
                self._read_index(index)
            elif single.is_file():
                self._files = dict.fromkeys(self._opened(single).keys(), single)
            else:
                raise CheckpointError(
                    f"{self.folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; weights must be in safetensors"
                )
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
        return self._opened(self._files[name]).get_slice(name)

    def _opened(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: damaged ({error}); download or export it again") from None
        return self._open[path]

    def _read_index(self, index: Path) -> None:
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            self._files = {name: self.folder / file for name, file in weight_map.items()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{index}: not an index of safetensors; download or export it again") from None
        held: dict[Path, set[str]] = {}
        for path in sorted(set(self._files.values())):
            if not path.is_file():
                raise CheckpointError(f"{path}: missing, though {INDEX_FILE} lists it; download or export it again")
            held[path] = set(self._opened(path).keys())
        for name, path in self._files.items():
            if name not in held[path]:
                raise CheckpointError(f"{path}: {name} is not in it, though {INDEX_FILE} says so; download it again")
