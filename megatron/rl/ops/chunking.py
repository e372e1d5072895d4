"""Which tokens are multiplied, how many at a time, and with sequence parallelism whose they are."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megatron.rl.errors import ConfigError

Rows = slice | torch.Tensor  # which of a call's tokens: a range, or their indices

# Where the caller names no chunk size: a chunk's logits take at most this part of the device's memory, and no more
# tokens than bring a product near its full speed and keep the traffic of adding up d_weight small beside it.
_PART_OF_MEMORY = 128
_TOKENS = {"cpu": 1024, "cuda": 4096}
_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")
_GRAIN = 128  # tokens; narrower products run far below a GEMM's full speed


def chunk_size(token_chunk: int | None, weight: torch.Tensor) -> int:
    """Tokens per chunk: ``token_chunk``, or one chosen from the device's memory and the shard ``weight``.

    All tensor-parallel ranks must go through as many chunks, and a run must give the same numbers when it is repeated.
    So the choice rests on the memory that the device has, down to a power of two, and not on what is free just now:
    it is the same on all machines of one kind.

    Raises ConfigError for a ``token_chunk`` below 1.
    """
    if token_chunk is None:
        rows, hidden_size = weight.shape
        return chosen_chunk_size(rows, hidden_size, weight.element_size(), _memory(weight.device), weight.device.type)
    if token_chunk < 1:
        raise ConfigError(f"token_chunk must be at least 1 (got {token_chunk})")
    return token_chunk


def chosen_chunk_size(rows: int, hidden_size: int, element_size: int, memory: int, device_type: str) -> int:
    """Tokens per chunk where nobody names them: of a shard [rows, hidden_size] on a device of ``memory`` bytes."""
    fitting = (1 << (memory.bit_length() - 1)) // _PART_OF_MEMORY // (element_size * rows)
    # A quarter of the weight's own size, which its gradient needs in any case, is always there to be used.
    size = max(fitting, hidden_size // 4, _GRAIN) // _GRAIN * _GRAIN
    return min(size, _TOKENS[device_type])


def _memory(device: torch.device) -> int:
    """Bytes that the device has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min([psutil.virtual_memory().total, *_container_limit()])


def _container_limit() -> list[int]:
    """The memory that a container's control group allows, in bytes; none where there is no limit."""
    if not _CONTROL_GROUP.is_file():
        return []
    limit = _CONTROL_GROUP.read_text().strip()
    return [] if limit == "max" else [int(limit)]


def active_rows(weights: torch.Tensor) -> Rows:
    """The entries that are not zero (NaN included): a slice if all are, else their indices."""
    indices = weights.nonzero().squeeze(1)
    return slice(0, weights.shape[0]) if indices.shape[0] == weights.shape[0] else indices


@dataclass(frozen=True)
class Exchange:
    """How the ranks of sequence parallelism share a chunk's tokens, of which each holds its own hidden states."""

    own: torch.Tensor  # this rank's tokens among its slice
    width: int  # tokens of the rank that has most; every rank sends as many
    places: torch.Tensor | None  # of the chunk's tokens among ranks x width; None where they fill it


@dataclass(frozen=True)
class Chunk:
    """Tokens that are multiplied together."""

    part: slice  # their place among all that the call multiplies
    rows: Rows  # which tokens they are
    exchange: Exchange | None = None  # with sequence parallelism


@dataclass(frozen=True)
class Plan:
    """A call's chunks, and in their order the tokens that it multiplies."""

    rows: Rows
    chunks: list[Chunk]

    @property
    def widest(self) -> int:
        """Tokens of the largest chunk."""
        return max((chunk.part.stop - chunk.part.start for chunk in self.chunks), default=0)


def plan_chunks(rows: Rows, size: int) -> Plan:
    """Cuts ``rows`` into chunks of ``size`` tokens."""
    count = rows.stop if isinstance(rows, slice) else rows.shape[0]
    parts = [slice(first, min(first + size, count)) for first in range(0, count, size)]
    return Plan(rows, [Chunk(part, part if isinstance(rows, slice) else rows[part]) for part in parts])


def plan_shared_chunks(rows: torch.Tensor, size: int, tokens_per_rank: int, ranks: int, rank: int) -> Plan:
    """Cuts ascending ``rows`` into chunks of about ``size`` tokens that hold the same part of each rank's.

    Rank r holds tokens [r * tokens_per_rank, (r + 1) * tokens_per_rank). Then what the ranks gather and reduce for
    a chunk is the chunk's alone, and as balanced as the whole call. A chunk may exceed ``size`` by less than ``ranks``.
    """
    counts = torch.bincount(rows // max(tokens_per_rank, 1), minlength=ranks).tolist()
    starts = [sum(counts[:r]) for r in range(ranks)]
    number = -(-rows.shape[0] // size)
    chunks: list[Chunk] = []
    order: list[torch.Tensor] = []
    done = 0
    for k in range(number):
        spans = [(s + c * k // number, s + c * (k + 1) // number) for s, c in zip(starts, counts, strict=True)]
        width = max(stop - start for start, stop in spans)
        own = rows[slice(*spans[rank])] - rank * tokens_per_rank
        index = torch.arange(width, device=rows.device)
        places = torch.cat([r * width + index[: stop - start] for r, (start, stop) in enumerate(spans)])
        full = places.shape[0] == ranks * width
        order.append(torch.cat([rows[start:stop] for start, stop in spans]))
        part = slice(done, done + places.shape[0])
        chunks.append(Chunk(part, order[-1], Exchange(own, width, None if full else places)))
        done = part.stop
    return Plan(torch.cat(order) if order else rows, chunks)
