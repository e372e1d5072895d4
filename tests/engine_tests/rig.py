"""An engine of one kind over a tiny model, with two sets of weights and ``transformers`` as the judge."""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from megatron.rl.config import SamplingConfig
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.hf import HFEngine
from megatron.rl.rollout.http_engine import HttpEngine
from megatron.rl.rollout.server_api import ServerApi
from megatron.rl.rollout.servers import SERVER_SPECS, ServerSettings, start_servers
from megatron.rl.rollout.sglang import SglangApi
from megatron.rl.rollout.vllm import VllmApi
from megatron.rl.types import Completion, GenerationRequest
from megatron.rl.weights import load_into_hf_model, save_hf_checkpoint

ROOT = Path(__file__).resolve().parents[2]
VOCAB, PAD, EOS, MAX_LENGTH = 128, 0, 2, 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3Config", {"tie_word_embeddings": True}),
    "experts": ("Qwen3MoeConfig", _EXPERTS),
}
_SHARD_BYTES = 50_000  # several files for each update


@dataclass
class Rig:
    """The engine under test.

    Attributes:
        models: the judge's, one for each set of weights.
        held: {policy version: which set of weights it was}.
    """

    kind: str
    engine: RolloutEngine
    folder: Path
    models: Sequence[Any]
    weights: Sequence[dict[str, torch.Tensor]]
    urls: Sequence[str]
    held: dict[int, int] = field(default_factory=lambda: {0: 0})
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def update(self, index: int) -> int:
        """Hands over a set of weights as the next policy version, which it returns."""
        version = next(self._numbers)
        self.held[version] = index
        self.engine.update_weights(iter(self.weights[index].items()), version)
        return version

    def with_ends(self, eos_token_ids: Sequence[int]) -> RolloutEngine:
        """Another engine over the same weights, whose responses end at other tokens."""
        return _engine(self.kind, self.folder, self.weights[0], eos_token_ids, self.urls, (), self.engine.version)

    @torch.inference_mode()
    def logits(self, completion: Completion, index: int) -> torch.Tensor:
        """[response tokens, VOCAB] of one full pass of the judge."""
        ids = torch.tensor([completion.prompt_ids + completion.token_ids])
        output = self.models[index](input_ids=ids, use_cache=False)
        return output.logits[0, len(completion.prompt_ids) - 1 : -1].float()


@contextmanager
def open_rig(kind: str, model: str, folder: Path) -> Iterator[Rig]:
    folders = [_save(model, seed, folder / f"weights-{seed}") for seed in range(2)]
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
        for path in folders
    ]
    weights = [load_file(path / "model.safetensors") for path in folders]
    with ExitStack() as stack:
        processes = []
        if kind != "hf":
            environment = Path(os.environ.get(f"{kind.upper()}_ENV", ROOT / f".venv-{kind}"))
            settings = ServerSettings(environment / "bin/python", folders[0], "float32", MAX_LENGTH, on_cpu=True)
            processes = start_servers(SERVER_SPECS[kind], settings, count=1, log_dir=folder)
        urls = [process.url for process in processes]
        engine = stack.enter_context(_engine(kind, folders[0], weights[0], [EOS], urls, processes, 0))
        yield Rig(kind, engine, folders[0], [each.eval() for each in models], weights, urls)


def _engine(
    kind: str,
    folder: Path,
    weights: dict[str, torch.Tensor],
    eos_token_ids: Sequence[int],
    urls: Sequence[str],
    processes: Sequence[Any],
    version: int,
) -> RolloutEngine:
    if kind == "hf":
        return HFEngine(
            folder,
            load_tensors=load_into_hf_model,
            eos_token_ids=eos_token_ids,
            pad_token_id=PAD,
            max_batch_size=30,
            version=version,
        )
    api: ServerApi = VllmApi() if kind == "vllm" else SglangApi(VOCAB)
    return HttpEngine(
        urls,
        api,
        vocab_size=VOCAB,
        max_length=MAX_LENGTH,
        eos_token_ids=eos_token_ids,
        tensor_names=weights.keys(),
        save_tensors=lambda path, tensors: save_hf_checkpoint(
            path, tensors, source_dir=folder, max_shard_bytes=_SHARD_BYTES
        ),
        sync_dir=folder.parent / "sync",
        processes=processes,
        version=version,
    )


def _save(model: str, seed: int, folder: Path) -> Path:
    class_name, changes = MODELS[model]
    torch.manual_seed(seed)
    config = getattr(transformers, class_name)(**{**_COMMON, **changes})
    random_model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in random_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    random_model.save_pretrained(folder)
    return folder


def make_requests(count: int, sampling: SamplingConfig, seed: int = 0, group: int = 4) -> list[GenerationRequest]:
    """``group`` requests for each of some prompts of 1 to 40 tokens, which may hold any token of the vocabulary."""
    rng = random.Random(seed)
    requests: list[GenerationRequest] = []
    while len(requests) < count:
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40)))
        for _ in range(min(group, count - len(requests))):
            requests.append(GenerationRequest(f"r{len(requests)}", prompt, sampling, seed=1000 * seed + len(requests)))
    return requests
