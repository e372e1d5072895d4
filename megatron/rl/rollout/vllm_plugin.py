"""Loaded by vLLM itself, in each of its processes: mends what goes wrong there on CPUs.

vLLM finds :func:`register` by the entry point group ``vllm.general_plugins``; this package has to be installed in
vLLM's environment for that. Nothing else of this package is imported here, and vLLM only inside the functions.

Two of the faults (vLLM 0.32) leave no error, only wrong probabilities after an update in place:

- experts: the first load packs them for the CPU's kernel; later ones copy the unpacked weights over the packed ones.
- an output head tied to the embedding: its packed copy keeps the old weights.

The third ends the server: where a request has a seed and its prompt is read in several steps (a long one, or one
that is read anew after an update in mid-response), vLLM takes a random number back by a method that generators of CPUs
lack.
"""

import functools
import logging
from typing import Any

_log = logging.getLogger(f"vllm.{__name__}")
_MENDED = "_megatron_rl_mended"


def register() -> None:
    """Puts the mends in place where vLLM runs on a CPU. vLLM may call it several times."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    if hasattr(layerwise, _MENDED):
        return
    _pack_experts_again(UnquantizedFusedMoEMethod)
    _pack_tied_heads_again(layerwise)
    _let_generators_be_rewound(CachedRequestState)
    setattr(layerwise, _MENDED, True)
    _log.info("megatron-drpo: mended weight updates of experts and tied output heads, and seeds, on CPUs")


def _pack_experts_again(method: Any) -> None:
    original = method._setup_kernel

    @functools.wraps(original)
    def setup_kernel(self: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, *args, **kwargs)
        if is_update:  # the first time, the original does it
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    method._setup_kernel = setup_kernel


def _pack_tied_heads_again(layerwise: Any) -> None:
    original = layerwise.finalize_layerwise_processing

    @functools.wraps(original)
    def finalize(model: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        original(model, *args, **kwargs)
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    layerwise.finalize_layerwise_processing = finalize


def _let_generators_be_rewound(request_state: Any) -> None:
    """The number is not taken back: each is still drawn once, but which one a token gets depends on the steps."""
    import torch

    class Generator(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> "Generator":
            return self

    original = request_state.__post_init__

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        if self.generator is not None:
            generator = Generator(device="cpu")
            generator.set_state(self.generator.get_state())
            self.generator = generator

    request_state.__post_init__ = post_init
