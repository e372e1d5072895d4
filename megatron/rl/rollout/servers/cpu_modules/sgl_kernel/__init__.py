"""Stands in for SGLang's CUDA kernels on machines without a GPU, where SGLang imports them and calls none.

First on the path of such servers only. Whatever is imported from here raises when it is called.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel, and this server runs on a CPU")

    return missing
