"""From samples to padded tensors, and the share of each data-parallel rank and micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.rl.types import Sample


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch. Position t of a row sees tokens 0..t and predicts ``targets[t]``, the token at t + 1.

    All but ``response_tokens`` are [batch, sequence]. Where ``mask`` is false, log-probability and advantage
    are zero, and the target is a prompt token or padding.
    """

    tokens: torch.Tensor  # int64
    position_ids: torch.Tensor  # int64
    targets: torch.Tensor  # int64
    mask: torch.Tensor  # bool; the target was sampled by the policy
    behavior_logprobs: torch.Tensor  # float32, natural logarithm of mu of the target
    advantages: torch.Tensor  # float32
    response_tokens: torch.Tensor  # int64 [batch]; sampled tokens of the row's whole response, 0 in a row without one


def split_for_rank(
    samples: Sequence[Sample], dp_rank: int, dp_size: int, micro_batch_size: int
) -> list[list[Sample | None]]:
    """The micro-batches of one data-parallel rank: the same number of the same size on every rank.

    Samples are dealt in turn, so ranks differ by one sample at most. Where they run out, None stands for an
    empty row: a rank without samples still takes part in every forward, backward and collective.
    """
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"data-parallel rank {dp_rank} is outside 0..{dp_size - 1}")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1 (got {micro_batch_size})")
    largest_share = -(-len(samples) // dp_size)
    batches = max(1, -(-largest_share // micro_batch_size))
    mine: list[Sample | None] = list(samples[dp_rank::dp_size])
    mine += [None] * (batches * micro_batch_size - len(mine))
    return [mine[start : start + micro_batch_size] for start in range(0, len(mine), micro_batch_size)]


def padded_length(samples: Sequence[Sample], multiple: int) -> int:
    """The longest sample's tokens, prompt and response, rounded up to a multiple."""
    longest = max(len(sample.completion.prompt_ids) + len(sample.completion.token_ids) for sample in samples)
    return -(-longest // multiple) * multiple


def collate(rows: Sequence[Sample | None], length: int, pad_id: int, device: torch.device | str = "cpu") -> TokenBatch:
    """Pads ``rows`` on the right to ``length`` tokens; None is a row of padding.

    Every sampled token is trained, the end-of-sequence token included, and nothing else: the mask goes by
    position, so ``pad_id`` may be any token, also the end-of-sequence one.

    Raises ValueError for a row that is longer than ``length``, has no prompt token (nothing would predict the
    first response token), or has another number of log-probabilities than of response tokens.
    """
    shape = (len(rows), length)
    tokens = torch.full(shape, pad_id, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.bool)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    advantages = torch.zeros(shape, dtype=torch.float32)
    for row, sample in enumerate(rows):
        if sample is None:
            continue
        prompt, response = sample.completion.prompt_ids, sample.completion.token_ids
        _check(sample, length)
        end = len(prompt) + len(response)
        predicting = slice(len(prompt) - 1, end - 1)
        tokens[row, :end] = torch.tensor(prompt + response, dtype=torch.int64)
        mask[row, predicting] = True
        logprobs[row, predicting] = torch.tensor(sample.completion.logprobs, dtype=torch.float32)
        advantages[row, predicting] = sample.advantage
    targets = torch.full(shape, pad_id, dtype=torch.int64)
    targets[:, :-1] = tokens[:, 1:]
    batch = TokenBatch(
        tokens=tokens,
        position_ids=torch.arange(length).expand(shape).contiguous(),
        targets=targets,
        mask=mask,
        behavior_logprobs=logprobs,
        advantages=advantages,
        response_tokens=mask.sum(dim=1),
    )
    return TokenBatch(**{name: tensor.to(device) for name, tensor in vars(batch).items()})


def _check(sample: Sample, length: int) -> None:
    completion = sample.completion
    prompt, response, logprobs = map(len, (completion.prompt_ids, completion.token_ids, completion.logprobs))
    if prompt == 0:
        raise ValueError(f"request {completion.request_id} has no prompt token")
    if response != logprobs:
        raise ValueError(f"request {completion.request_id} has {response} tokens but {logprobs} log-probabilities")
    if prompt + response > length:
        raise ValueError(f"request {completion.request_id} has {prompt + response} tokens, more than a row's {length}")
