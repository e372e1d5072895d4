"""The contract of every rollout engine, and the checks on what it gives back."""

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Self

import torch

from megatron.rl.errors import RolloutError
from megatron.rl.types import Completion, GenerationRequest


class RolloutEngine(abc.ABC):
    """Samples responses: token ids in; token ids and the log-probabilities they were sampled with out.

    Each process submits its own share of the requests and gets back the completions of these. The public methods
    hold the contract for all engines; an engine implements :meth:`_generate` and :meth:`_load`.

    Args:
        vocab_size: token ids are below it, in prompts and in responses.
        max_length: longest prompt plus response in tokens; None where the model sets no limit.
        version: policy version of the weights that the engine starts with.
    """

    def __init__(self, *, vocab_size: int, max_length: int | None, version: int = 0) -> None:
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._version: int | None = version  # None: the last update failed, the weights are not those of any version

    # Whether an update is copied within this process, where nothing can go wrong in silence.
    holds_weights_here = False

    @property
    def version(self) -> int:
        """The policy version of the engine's weights.

        Raises:
            RolloutError: the last weight update failed.
        """
        if self._version is None:
            raise RolloutError("the engine's weights are half updated; it samples again after a complete update")
        return self._version

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """The completion of every request, each as soon as it is finished, so in no particular order.

        Raises:
            RolloutError: a request that the engine cannot serve (before anything is sampled), a completion that
                breaks the contract (see :func:`check_completion`), or a request left without an answer.
            ValueError: two requests with one id.
        """
        pending = {request.request_id: request for request in requests}
        if len(pending) < len(requests):
            raise ValueError(f"{len(requests) - len(pending)} requests repeat the id of another")
        for request in requests:
            check_request(request, vocab_size=self._vocab_size, max_length=self._max_length)
        _ = self.version  # a failed update stops here, not at the first completion
        return self._checked(pending)

    def _checked(self, pending: dict[str, GenerationRequest]) -> Iterator[Completion]:
        for completion in self._generate(list(pending.values())):
            request = pending.pop(completion.request_id, None)
            if request is None:
                raise RolloutError(f"request {completion.request_id}: answered twice, or never asked")
            check_completion(request, completion, vocab_size=self._vocab_size)
            yield completion
        if pending:
            raise RolloutError(f"request {next(iter(pending))}: the engine gave no answer ({len(pending)} in all)")

    def update_weights(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Replaces all weights by ``tensors``: full tensors with Hugging Face names, an iterator read to its end.

        Collective where making the tensors is. All or nothing: an engine whose update failed serves no request
        until another one succeeds.
        """
        self._version = None
        self._load(tensors, version)
        self._version = version

    @abc.abstractmethod
    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[Completion]:
        """Completions of requests that passed :func:`check_request`, in order of completion."""

    @abc.abstractmethod
    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes over the weights of policy ``version``. Raises where any of them could not be taken over."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what the engine holds. Nothing may be asked of it afterwards."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_request(request: GenerationRequest, *, vocab_size: int, max_length: int | None) -> None:
    """Refuses a request that no engine could serve.

    Raises:
        RolloutError: names the request and the setting.
    """
    sampling, prompt = request.sampling, request.prompt_ids
    where = f"request {request.request_id}"
    if not prompt:
        raise RolloutError(f"{where}: the prompt has no token; an engine needs at least one to continue")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RolloutError(
            f"{where}: prompt ids must be in [0, {vocab_size}), the model's vocabulary; does the tokenizer belong to "
            f"the model? (got {min(prompt) if min(prompt) < 0 else max(prompt)})"
        )
    if sampling.max_new_tokens < 1:
        raise RolloutError(f"{where}: max_new_tokens must be at least 1 (got {sampling.max_new_tokens})")
    if not 0 <= sampling.temperature < math.inf:
        raise RolloutError(f"{where}: temperature must be positive, or 0 for greedy (got {sampling.temperature})")
    if not 0 < sampling.top_p <= 1:
        raise RolloutError(f"{where}: top_p must be in (0, 1], where 1 is off (got {sampling.top_p})")
    if sampling.top_k < 0:
        raise RolloutError(f"{where}: top_k must be positive, or 0 for off (got {sampling.top_k})")
    wanted = len(prompt) + sampling.max_new_tokens
    if max_length is not None and wanted > max_length:
        raise RolloutError(
            f"{where}: {len(prompt)} prompt tokens + up to {sampling.max_new_tokens} new ones exceed the model's "
            f"{max_length} positions; lower --max-prompt-tokens or --max-response-tokens (got {wanted})"
        )


def check_completion(request: GenerationRequest, completion: Completion, *, vocab_size: int) -> None:
    """Refuses a completion that the trainer could only use by guessing. Nothing is ever mended or replaced.

    A response without tokens is accepted from an aborted request only: a sampled end-of-sequence token belongs to
    the response.

    Raises:
        RolloutError: names the request and the position in the response.
    """
    where = f"request {request.request_id}"
    tokens, logprobs = completion.token_ids, completion.logprobs
    if completion.prompt_ids != request.prompt_ids:
        raise RolloutError(
            f"{where}: the engine changed the prompt's token ids ({len(request.prompt_ids)} sent, "
            f"{len(completion.prompt_ids)} back); does it add special tokens or tokenise again?"
        )
    if not len(tokens) == len(logprobs) == len(completion.versions):
        raise RolloutError(
            f"{where}: {len(tokens)} tokens came with {len(logprobs)} log-probabilities and "
            f"{len(completion.versions)} policy versions; each token needs one of both"
        )
    if not tokens and completion.finish_reason != "abort":
        raise RolloutError(f"{where}: the response is empty; does the engine leave the end-of-sequence token out?")
    if len(tokens) > request.sampling.max_new_tokens:
        raise RolloutError(
            f"{where}: {len(tokens)} tokens are more than the {request.sampling.max_new_tokens} asked for"
        )
    for position, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        if not 0 <= token < vocab_size:
            raise RolloutError(f"{where}: position {position} has token {token}, outside [0, {vocab_size})")
        # JSON has no NaN and no infinity: servers send null, which arrives as None. The comparison is false for NaN.
        if logprob is None or not -math.inf < logprob <= 0:
            raise RolloutError(
                f"{where}: position {position} (token {token}) has log-probability {logprob}; the engine must give "
                f"a finite number of at most 0 for every token"
            )
