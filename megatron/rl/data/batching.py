"""From samples to the tensors of a micro-batch, whole or one context-parallel rank's share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from megatron.rl.config import BatchingConfig
from megatron.rl.data.cutting import Cut, cut
from megatron.rl.types import Sample


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch. A position sees those before it in its sequence and predicts ``targets`` there, the next token.

    Tensors but ``response_tokens`` and ``cu_seqlens`` are [rows, positions]: a row is one sequence, or, packed, the
    only row holds all of them one after another. Under context parallelism the positions are those of this rank. Where
    ``mask`` is false, log-probability and advantage are zero, and the target is a prompt token or padding.
    """

    tokens: torch.Tensor  # int64
    position_ids: torch.Tensor  # int64, within the sequence
    targets: torch.Tensor  # int64
    mask: torch.Tensor  # bool; the target was sampled by the policy
    behavior_logprobs: torch.Tensor  # float32, natural logarithm of mu of the target
    advantages: torch.Tensor  # float32
    sequence_ids: torch.Tensor  # int64, which of the micro-batch's responses; -1 in padding that belongs to none
    is_padding: torch.Tensor  # bool; neither prompt nor response
    response_tokens: torch.Tensor  # int64 [responses]; sampled tokens of the whole response
    cu_seqlens: torch.Tensor | None  # int32 [sequences + 1]; packed: bounds of the whole sequences, else None
    places: tuple[int, ...]  # of its responses in the mini-batch


class MicroBatcher:
    """Makes one data-parallel and context-parallel rank's micro-batches of a mini-batch.

    Args:
        config: how mini-batches are cut, and the multiples that lengths are padded to.
        dp_rank, dp_size, cp_rank, cp_size: the rank's place in the data-parallel and the context-parallel group.
        pad_id: any token; what is padding goes by position.
        device: of the tensors.
    """

    def __init__(
        self,
        config: BatchingConfig,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        cp_rank: int = 0,
        cp_size: int = 1,
        pad_id: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._dp = dp_rank, dp_size
        self._cp = cp_rank, cp_size
        self._pad_id = pad_id
        self._device = device

    def __call__(self, samples: Sequence[Sample]) -> list[TokenBatch]:
        """This rank's micro-batches of ``samples``, which all ranks pass alike; equally many on every rank."""
        dp_rank, dp_size = self._dp
        lengths = [len(sample.completion.prompt_ids) + len(sample.completion.token_ids) for sample in samples]
        mine = cut(lengths, dp_size, self._config)[dp_rank]
        batches = [collate(samples, shape, self._pad_id) for shape in mine]
        if self._cp[1] > 1:
            batches = [context_share(batch, *self._cp) for batch in batches]
        return [_changed(batch, lambda tensor: tensor.to(self._device)) for batch in batches]


def collate(samples: Sequence[Sample], shape: Cut, pad_id: int) -> TokenBatch:
    """The micro-batch of ``shape`` from the mini-batch ``samples``, each sequence padded at its end.

    Every sampled token is trained, the end-of-sequence token included, and nothing else: the mask goes by
    position, so ``pad_id`` may be any token, also the end-of-sequence one.

    Raises ValueError for a sequence that is longer than its place, has no prompt token (nothing would predict the
    first response token), or has another number of log-probabilities than of response tokens.
    """
    size = (shape.rows, shape.length)
    tokens = torch.full(size, pad_id, dtype=torch.int64)
    targets = tokens.clone()
    positions = torch.zeros(size, dtype=torch.int64)
    mask = torch.zeros(size, dtype=torch.bool)
    logprobs = torch.zeros(size, dtype=torch.float32)
    advantages = torch.zeros(size, dtype=torch.float32)
    sequence_ids = torch.full(size, -1, dtype=torch.int64)
    is_padding = torch.ones(size, dtype=torch.bool)
    for number, (row, start, length) in enumerate(_spans(shape)):
        positions[row, start : start + length] = torch.arange(length)
        if number >= len(shape.places):
            continue
        sample = samples[shape.places[number]]
        prompt, response = sample.completion.prompt_ids, sample.completion.token_ids
        _check(sample, length)
        end = start + len(prompt) + len(response)
        predicting = slice(start + len(prompt) - 1, end - 1)
        tokens[row, start:end] = torch.tensor(prompt + response, dtype=torch.int64)
        targets[row, start : end - 1] = tokens[row, start + 1 : end]
        mask[row, predicting] = True
        logprobs[row, predicting] = torch.tensor(sample.completion.logprobs, dtype=torch.float32)
        advantages[row, predicting] = sample.advantage
        sequence_ids[row, start : start + length] = number
        is_padding[row, start:end] = False
    bounds = None if shape.packed is None else torch.tensor([0, *accumulate(shape.packed)], dtype=torch.int32)
    lengths = [len(samples[place].completion.token_ids) for place in shape.places]
    return TokenBatch(
        tokens=tokens,
        position_ids=positions,
        targets=targets,
        mask=mask,
        behavior_logprobs=logprobs,
        advantages=advantages,
        sequence_ids=sequence_ids,
        is_padding=is_padding,
        response_tokens=torch.tensor(lengths, dtype=torch.int64),
        cu_seqlens=bounds,
        places=shape.places,
    )


def context_share(batch: TokenBatch, rank: int, ranks: int) -> TokenBatch:
    """A context-parallel rank's positions of a whole micro-batch, as Megatron and Transformer Engine deal them.

    Each sequence is cut into 2 x ``ranks`` chunks, of which a rank has the ``rank``-th and the ``rank``-th from the
    end. Targets were set before, so a chunk's last position predicts the first token of the next chunk.

    Raises ValueError where a sequence's length is no multiple of 2 x ``ranks``.
    """
    length = batch.tokens.shape[1]
    bounds = [0, length] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    mine = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        if (end - start) % (2 * ranks):
            raise ValueError(f"a sequence of {end - start} tokens cannot be cut into {2 * ranks} chunks")
        chunk = (end - start) // (2 * ranks)
        for first in (start + rank * chunk, end - (rank + 1) * chunk):
            mine.append(torch.arange(first, first + chunk))
    index = torch.cat(mine)
    return _changed(batch, lambda tensor: tensor[:, index] if tensor.dim() == 2 else tensor)


def _changed(batch: TokenBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenBatch:
    """``change`` applied to each tensor."""
    tensors: dict[str, Any] = {
        name: change(value) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
    }
    return replace(batch, **tensors)


def _spans(shape: Cut) -> Iterator[tuple[int, int, int]]:
    """Row, first position and length of each sequence, padding's last."""
    if shape.packed is None:
        yield from ((row, 0, shape.length) for row in range(shape.rows))
        return
    for start, length in zip(accumulate(shape.packed, initial=0), shape.packed, strict=False):
        yield 0, start, length


def _check(sample: Sample, length: int) -> None:
    completion = sample.completion
    prompt, response, logprobs = map(len, (completion.prompt_ids, completion.token_ids, completion.logprobs))
    if prompt == 0:
        raise ValueError(f"request {completion.request_id} has no prompt token")
    if response != logprobs:
        raise ValueError(f"request {completion.request_id} has {response} tokens but {logprobs} log-probabilities")
    if prompt + response > length:
        raise ValueError(f"request {completion.request_id} has {prompt + response} tokens, more than a row's {length}")
