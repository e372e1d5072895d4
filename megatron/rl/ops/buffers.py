"""Large buffers whose memory is quick to touch for the first time."""

import ctypes
import functools
import sys

import torch

_SMALL = 4 << 20  # bytes; below it a few page faults do not matter
_PAGE = 4096
_MADV_HUGEPAGE = 14


def large_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor; on Linux CPUs the kernel is asked to back it with huge pages.

    A CPU buffer of this size is fresh memory at each call. Its first pages, 4 KiB each, cost as much as a third of
    the product that fills it: 29 ms for 64 MiB where a product of 2 x 1024 x 1024 x 32768 operations takes 90 ms.
    With huge pages it is 5 to 10 ms. The kernel is free to ignore the advice, and nothing else depends on it.
    """
    buffer = torch.empty(shape, dtype=dtype, device=device)
    size = buffer.numel() * buffer.element_size()
    if device.type == "cpu" and sys.platform == "linux" and size >= _SMALL:
        start = -(-buffer.data_ptr() // _PAGE) * _PAGE
        length = (buffer.data_ptr() + size - start) // _PAGE * _PAGE
        _libc().madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return buffer


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
