"""Which tokens are multiplied, and how many at a time."""

from collections.abc import Iterator

import torch

from megatron.rl.errors import ConfigError

Rows = slice | torch.Tensor  # which of a call's tokens: a range, or their indices

_CHUNK_BYTES = 256 << 20  # of logits, where the caller names no chunk size
_GRAIN = 128  # tokens; narrower products run far below a GEMM's full speed


def chunk_size(token_chunk: int | None, logit_bytes: int, local_vocabulary: int) -> int:
    """Tokens per chunk: ``token_chunk``, or as many as keep a chunk's logits within a fixed memory.

    It depends only on what is equal on all tensor-parallel ranks, since all must go through as many chunks.
    Raises ConfigError for a ``token_chunk`` below 1.
    """
    if token_chunk is None:
        return max(_CHUNK_BYTES // (logit_bytes * local_vocabulary) // _GRAIN * _GRAIN, _GRAIN)
    if token_chunk < 1:
        raise ConfigError(f"token_chunk must be at least 1 (got {token_chunk})")
    return token_chunk


def active_rows(weights: torch.Tensor) -> Rows:
    """The entries that are not zero (NaN included): a slice if all are, else their indices."""
    indices = weights.nonzero().squeeze(1)
    return slice(0, weights.shape[0]) if indices.shape[0] == weights.shape[0] else indices


def chunks(rows: Rows, size: int) -> Iterator[tuple[slice, Rows]]:
    """Cuts ``rows`` into chunks: (their place among the rows, the tokens themselves)."""
    count = rows.stop if isinstance(rows, slice) else rows.shape[0]
    for first in range(0, count, size):
        part = slice(first, min(first + size, count))
        yield part, part if isinstance(rows, slice) else rows[part]
