"""Tiny random Hugging Face checkpoints and requests for them."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.rl.config import SamplingConfig
from megatron.rl.rollout.hf import HFEngine
from megatron.rl.types import Completion, GenerationRequest
from megatron.rl.weights import load_into_hf_model

VOCAB, PAD, EOS = 61, 0, 2
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeConfig", _EXPERTS),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 5}),
    "mha": ("Qwen3Config", {"num_key_value_heads": 6}),
}


def make_model(family: str, seed: int = 0) -> Any:
    """A random model whose next-token distributions are far from uniform."""
    class_name, changes = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, class_name)(**{**_COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def make_engine(folder: Path, **changes: Any) -> HFEngine:
    options: dict[str, Any] = {"load_tensors": load_into_hf_model, "eos_token_ids": [EOS], "pad_token_id": PAD}
    return HFEngine(folder, **{**options, **changes})


def make_requests(count: int, sampling: SamplingConfig, group: int = 3, seed: int = 0) -> list[GenerationRequest]:
    """Requests for prompts of 1 to 9 tokens, ``group`` for each prompt. Prompts may hold the pad and eos ids."""
    rng = random.Random(seed)
    requests: list[GenerationRequest] = []
    while len(requests) < count:
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 9)))
        for _ in range(min(group, count - len(requests))):
            index = len(requests)
            requests.append(GenerationRequest(f"r{index}", prompt, sampling, seed=1000 * seed + index))
    return requests


@torch.inference_mode()
def logits_of(model: Any, completion: Completion) -> torch.Tensor:
    """[response tokens, VOCAB] of one full pass without cache, padding or batch."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    return model(input_ids=ids, use_cache=False).logits[0, len(completion.prompt_ids) - 1 : -1].float()


def by_id(completions: Any) -> dict[str, Completion]:
    return {completion.request_id: completion for completion in completions}
