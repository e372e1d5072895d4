"""The embedded engine: a ``transformers`` model inside the trainer's process."""

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.attention import GROUPED_DECODING
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.sampling import draw_tokens
from megatron.rl.types import Completion, FinishReason, GenerationRequest

MAX_BATCH_SIZE = 256
LoadTensors = Callable[[PreTrainedModel, Iterator[tuple[str, torch.Tensor]]], None]


class HFEngine(RolloutEngine):
    """Samples with a full copy of the policy, held by each process.

    A response depends on its request's prompt, sampling and seed and on the weights: neither on the other requests
    of the batch nor on the process, up to float rounding. Truncated sampling is exact: ``logprobs`` are those of
    the renormalised distribution.

    Args:
        model_dir: Hugging Face checkpoint folder. Nothing is downloaded and no code of the checkpoint is run.
        load_tensors: copies a stream of hub-named tensors into a model, and raises where it does not fill it.
        eos_token_ids: each ends a response and is its last token.
        pad_token_id: any token of the vocabulary; it is masked by position, so it may be an end-of-sequence token.
        device: where the model lives.
        dtype: of weights and activations. Log-probabilities are float32 in any case.
        max_batch_size: responses decoded at a time; bounds the key-value cache.
        version: policy version of the folder's weights.

    Raises:
        RolloutError: ``model_dir`` holds no checkpoint, or an end-of-sequence token is outside the vocabulary.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        load_tensors: LoadTensors,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = MAX_BATCH_SIZE,
        version: int = 0,
    ) -> None:
        model = _load_model(Path(model_dir), dtype).to(device)
        vocab_size = model.get_input_embeddings().weight.shape[0]
        super().__init__(
            vocab_size=vocab_size,
            max_length=getattr(model.config, "max_position_embeddings", None),
            version=version,
        )
        for token in (*eos_token_ids, pad_token_id):
            if not 0 <= token < vocab_size:
                raise RolloutError(
                    f"{model_dir}: special token {token} is outside the model's vocabulary of {vocab_size}; "
                    f"does the tokenizer belong to the model?"
                )
        self._model: PreTrainedModel | None = model
        self._load_tensors = load_tensors
        self._eos_token_ids = frozenset(eos_token_ids)
        self._pad_token_id = pad_token_id
        self._max_batch_size = max_batch_size

    holds_weights_here = True

    def close(self) -> None:
        """Frees the model."""
        self._model = None

    def _open_model(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("the engine is closed")
        return self._model

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self._load_tensors(self._open_model(), tensors)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        for batch in _batches(requests, self._max_batch_size):
            yield from self._decode(batch)

    @torch.inference_mode()
    def _decode(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Decodes a batch with one :class:`SamplingConfig` to its end."""
        sampling, version = requests[0].sampling, self.version
        context = _Context(self._open_model(), [request.prompt_ids for request in requests], self._pad_token_id)
        rows = [_Row(request, random.Random(request.seed)) for request in requests]
        logits = context.prefill()
        for position in range(sampling.max_new_tokens):
            uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
            tokens, logprobs = draw_tokens(logits, uniforms, sampling)
            _refuse_nan(rows, logprobs, position)
            is_last = position == sampling.max_new_tokens - 1
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if row.is_open:
                    row.append(token, logprob, version)
                    if token in self._eos_token_ids:
                        yield row.finish("stop")
                    elif is_last:
                        yield row.finish("length")
            kept = [index for index, row in enumerate(rows) if row.is_open]
            if not kept:
                return
            if self.version != version:
                # Updated while the caller held a completion: nothing of the old weights' cache may be used any more.
                version, rows = self.version, [rows[index] for index in kept]
                texts = [(*row.request.prompt_ids, *row.token_ids) for row in rows]
                context = _Context(self._open_model(), texts, self._pad_token_id)
                logits = context.prefill()
                continue
            # Finished rows cost their share of every pass; taking them out copies the cache. So: not one by one.
            if len(kept) <= 0.9 * len(rows):
                rows, tokens = [rows[index] for index in kept], tokens[kept]
                context.keep(kept)
            logits = context.step(tokens)


@dataclass
class _Row:
    """One response while it is decoded."""

    request: GenerationRequest
    # Not a torch.Generator: on CPUs that uses the lower 32 bits of its seed only.
    source: random.Random
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    is_open: bool = True

    def uniform(self) -> float:
        """The next number in (0, 1]."""
        return 1.0 - self.source.random()

    def append(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def finish(self, reason: FinishReason) -> Completion:
        self.is_open = False
        return Completion(
            request_id=self.request.request_id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            versions=tuple(self.versions),
        )


class _Context:
    """The key-value cache of the rows of a batch, with their padding and positions.

    Equal prompts (the group of one problem) pass through the model once. Prompts are padded on the left, so that all
    rows continue in the same column of the cache.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], pad_token_id: int) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        self._row_of = [distinct[prompt] for prompt in prompts]
        longest = max(map(len, distinct))
        self._ids = self._tensor([[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in distinct])
        lengths = self._tensor([len(prompt) for prompt in distinct])[:, None]
        columns = torch.arange(longest, device=model.device)
        self._positions = (columns - (longest - lengths)).clamp_(min=0)  # [rows, columns of this pass]
        # [rows, columns so far]; None without padding, which lets attention skip the mask.
        self._mask: torch.Tensor | None = None
        if len(set(map(len, distinct))) > 1:
            self._mask = columns >= longest - lengths

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, device=self._model.device)

    def prefill(self) -> torch.Tensor:
        """Logits [rows, vocabulary] of the first token of each response."""
        logits = self._forward(self._ids)
        self._select(self._row_of)
        return logits[self._row_of]

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of the token after ``tokens`` [rows]."""
        self._positions = self._positions[:, -1:] + 1
        if self._mask is not None:
            self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        return self._forward(tokens[:, None])

    def keep(self, rows: list[int]) -> None:
        """Drops all other rows."""
        self._select(rows)

    def _select(self, rows: list[int]) -> None:
        index = self._tensor(rows)
        self._cache.batch_select_indices(index)
        self._positions = self._positions[index]
        if self._mask is not None:
            self._mask = self._mask[index]

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: Any = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def _load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise RolloutError(f"{folder}: no Hugging Face checkpoint here (config.json is missing); check --hf-model")
    with _no_progress_bar():
        # Experts are left to transformers, whose choice (grouped_mm) was the fastest here: 1 to 2.5 times the speed
        # of a loop over experts, on CPUs in float32, at 1 to 256 tokens a pass.
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=GROUPED_DECODING, local_files_only=True, trust_remote_code=False
        )
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """The trainer has a display of its own, and every rank loads the model."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _batches(requests: Sequence[GenerationRequest], max_batch_size: int) -> Iterator[list[GenerationRequest]]:
    """Batches of about equal size, each with one way of sampling and prompts of similar length, equal ones adjacent."""
    by_sampling: dict[Any, list[GenerationRequest]] = {}
    for request in requests:
        by_sampling.setdefault(request.sampling, []).append(request)
    for alike in by_sampling.values():
        alike.sort(key=lambda request: (-len(request.prompt_ids), request.prompt_ids))
        count = -(-len(alike) // max_batch_size)
        for index in range(count):
            yield alike[len(alike) * index // count : len(alike) * (index + 1) // count]


def _refuse_nan(rows: Sequence[_Row], logprobs: torch.Tensor, position: int) -> None:
    if bool(torch.isnan(logprobs).any()):
        request = rows[int(torch.isnan(logprobs).nonzero()[0, 0])].request
        raise RolloutError(
            f"request {request.request_id}: the model's logits at position {position} of the response are not finite; "
            f"the policy has diverged (lower --lr) or its checkpoint is damaged"
        )
