"""The opponents that are installed apart: Liger, verl and cut-cross-entropy.

Entropy is left out wherever a peer can leave it out, which is in the peer's favour. Chunk and tile sizes are the
peers' own defaults.
"""

import importlib
import sys
from importlib import util
from types import ModuleType

import torch

from loss_benchmark.paths import Forward, LossPath, MissingPeer, Place, policy_gradient_loss, require, require_gpu

_INSTALL = "make env-bench"


def _liger_grpo(place: Place) -> Forward:
    require("liger_kernel", _INSTALL)
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    def forward(hidden, weight, inputs):
        # Its advantages are one a sequence, so every token is a sequence here; all of them in one chunk, since it
        # adds a whole weight gradient for each. Bounds that nothing reaches leave - mean(r * A).
        loss_of = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, chunk_size=inputs.tokens, epsilon_low=1.0, epsilon_high=float("inf")
        )
        loss, _ = loss_of(
            hidden.unsqueeze(1),
            weight,
            inputs.target_ids.unsqueeze(1),
            torch.ones_like(inputs.advantages).unsqueeze(1),
            inputs.advantages,
            old_per_token_logps=inputs.behavior_logprobs.unsqueeze(1),
        )
        return loss, None

    return forward


def _liger_selective(place: Place) -> Forward:
    require("liger_kernel", _INSTALL)
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    def forward(hidden, weight, inputs):
        logprobs = LigerFusedLinearPPOBase.chunk_forward(
            hidden.unsqueeze(0), weight, inputs.target_ids.unsqueeze(0)
        ).squeeze(0)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _liger_tensor_parallel(place: Place) -> Forward:
    require("liger_kernel", _INSTALL)
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    def forward(hidden, weight, inputs):
        if place.device.type == "cuda":
            nll = liger.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
                hidden, weight, inputs.target_ids, place.group
            )
        else:  # the public class refuses tensors on the CPU; its fallback does not
            nll = liger._TensorParallelFusedLinearPPOFallbackFunction.apply(
                hidden, weight, inputs.target_ids, 1.0, -100, False, place.group
            )
        return policy_gradient_loss(-nll, inputs), -nll

    return forward


def _liger_scaled(place: Place) -> Forward:
    require("liger_kernel", _INSTALL)
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    def forward(hidden, weight, inputs):
        logprobs = -LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, inputs.target_ids)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _verl_module(name: str) -> ModuleType:
    """A module of verl without the start-up code of ``verl`` and ``verl.utils``, which needs ray and tensordict."""
    require("verl", _INSTALL)
    for package in ("verl", "verl.utils"):
        if package not in sys.modules:
            spec = util.find_spec(package)
            assert spec is not None  # required above
            sys.modules[package] = bare = ModuleType(package)
            bare.__spec__, bare.__path__ = spec, list(spec.submodule_search_locations or ())
    return importlib.import_module(name)


def _verl_fused(place: Place) -> Forward:
    verl = _verl_module("verl.utils.experimental.torch_functional")
    fused = verl.FusedLinearForPPO()

    def forward(hidden, weight, inputs):
        logprobs, _ = fused(hidden, weight, inputs.target_ids)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _verl_vocab_parallel(place: Place) -> Forward:
    verl = _verl_module("verl.utils.megatron.tensor_parallel")
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()

    def forward(hidden, weight, inputs):
        logits = hidden @ weight.t()
        # As verl's Megatron worker does: the cross entropy may change its logits in place. What the entropy's own
        # gradient would need is freed at once, in verl's favour.
        copy = logits.clone()
        verl.vocab_parallel_entropy(logits)
        logprobs = verl.vocab_parallel_log_probs_from_logits(copy, inputs.target_ids)
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _verl_triton(place: Place) -> Forward:
    require("verl", _INSTALL)
    require_gpu(place, "verl's Triton kernel")
    verl = _verl_module("verl.utils.kernel.linear_cross_entropy")

    def forward(hidden, weight, inputs):
        logprobs, _ = verl.linear_cross_entropy(hidden, weight, inputs.target_ids, 1.0, "none")
        return policy_gradient_loss(logprobs, inputs), logprobs

    return forward


def _cut_cross_entropy(implementation: str) -> Forward:
    from cut_cross_entropy import linear_cross_entropy

    def forward(hidden, weight, inputs):
        nll = linear_cross_entropy(hidden, weight, inputs.target_ids, reduction="none", impl=implementation)
        return policy_gradient_loss(-nll, inputs), -nll

    return forward


def _cce(place: Place) -> Forward:
    require("cut_cross_entropy", _INSTALL)
    require_gpu(place, "cut-cross-entropy's Triton kernel")
    if place.dtype not in (torch.bfloat16, torch.float16):
        raise MissingPeer("its backward takes 16-bit inputs only")
    return _cut_cross_entropy("cce")


def _cce_torch_compile(place: Place) -> Forward:
    require("cut_cross_entropy", _INSTALL)
    return _cut_cross_entropy("torch_compile")


_NO_FLOAT32 = "adds the weight gradient up in the inputs' type"

PEERS = (
    LossPath(
        "liger-grpo",
        "liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss",
        "liger-kernel",
        keeps_logits=False,
        gemm_work=8,
        note="no entropy, no tensor parallelism; gives no log-probabilities; the gradients' GEMMs run in float32",
        prepare=_liger_grpo,
    ),
    LossPath(
        "liger-selective",
        "liger_kernel.chunked_loss.fused_linear_ppo.LigerFusedLinearPPOBase.chunk_forward",
        "liger-kernel",
        keeps_logits=False,
        gemm_work=8,
        note="no entropy, no tensor parallelism; the gradients' GEMMs run in float32",
        prepare=_liger_selective,
    ),
    LossPath(
        "liger-tp",
        "liger_kernel.ops.LigerFusedLinearScaledCrossEntropyTPFunction, on a CPU its fallback",
        "liger-kernel",
        keeps_logits=False,
        gemm_work=8,
        note=f"{_NO_FLOAT32}; two collectives a chunk; its entropy is not asked for",
        prepare=_liger_tensor_parallel,
    ),
    LossPath(
        "liger-scaled",
        "liger_kernel.ops.LigerFusedLinearScaledCrossEntropyFunction",
        "liger-kernel",
        keeps_logits=False,
        gemm_work=8,
        note=f"no tensor parallelism; {_NO_FLOAT32}; computes an entropy asked for or not; own kernels on Hopper only",
        prepare=_liger_scaled,
    ),
    LossPath(
        "verl-fused",
        "verl.utils.experimental.torch_functional.FusedLinearForPPO",
        "verl",
        keeps_logits=False,
        gemm_work=8,
        note=f"no tensor parallelism; {_NO_FLOAT32}; gives entropy; imported without verl's start-up code",
        prepare=_verl_fused,
    ),
    LossPath(
        "verl-vocab-parallel",
        "verl.utils.megatron.tensor_parallel.vocab_parallel_log_probs_from_logits and vocab_parallel_entropy",
        "verl",
        keeps_logits=True,
        gemm_work=6,
        note="no chunks; gives entropy; imported without verl's start-up code",
        prepare=_verl_vocab_parallel,
    ),
    LossPath(
        "verl-triton",
        "verl.utils.kernel.linear_cross_entropy.linear_cross_entropy",
        "verl",
        keeps_logits=False,
        gemm_work=8,
        note="no CPU path; gives entropy; imported without verl's start-up code",
        prepare=_verl_triton,
    ),
    LossPath(
        "cce",
        "cut_cross_entropy.linear_cross_entropy(impl='cce')",
        "cut-cross-entropy",
        keeps_logits=False,
        gemm_work=8,
        note="no entropy, no tensor parallelism; 16-bit inputs only; leaves small gradients out by its default filter",
        prepare=_cce,
    ),
    LossPath(
        "cce-torch-compile",
        "cut_cross_entropy.linear_cross_entropy(impl='torch_compile')",
        "cut-cross-entropy",
        keeps_logits=True,
        gemm_work=6,
        note="no entropy, no tensor parallelism, no chunks",
        prepare=_cce_torch_compile,
    ),
)
