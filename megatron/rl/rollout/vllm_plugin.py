"""Loaded by vLLM itself, in each of its processes: mends what goes wrong there, on CPUs, when weights are updated.

vLLM finds :func:`register` by the entry point group ``vllm.general_plugins``; this package has to be installed in
vLLM's environment for that. Nothing else of this package is imported here, and vLLM only inside the functions.

Both faults (vLLM 0.32) leave no error, only wrong probabilities after an update in place:

- experts: the first load packs them for the CPU's kernel; later ones copy the unpacked weights over the packed ones.
- an output head tied to the embedding: its packed copy keeps the old weights.
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

    if hasattr(layerwise, _MENDED):
        return
    _pack_experts_again(UnquantizedFusedMoEMethod)
    _pack_tied_heads_again(layerwise)
    setattr(layerwise, _MENDED, True)
    _log.info("megatron-drpo: weight updates on CPUs pack experts and tied output heads anew")


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
