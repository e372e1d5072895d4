"""How an SGLang server (0.5.23 and later) is spoken to, over its own routes."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.rl.config import SamplingConfig
from megatron.rl.errors import RolloutError
from megatron.rl.rollout.http_client import JsonClient
from megatron.rl.rollout.server_api import Reader, ServerAnswer, ServerApi, ServerFacts, folded_seed, logprob_of
from megatron.rl.types import GenerationRequest


class SglangApi(ServerApi):
    """Seeds count where the server runs with ``--enable-deterministic-inference``, which CPUs have not.

    With top-k and top-p together, SGLang keeps the tokens that either would keep of the whole distribution; the other
    engines apply top-p to what top-k left. Its log-probabilities are those of what it keeps.

    Args:
        vocab_size: of the policy. SGLang gives the exact probabilities of truncated sampling for a finite top-k only,
            and refuses one above its ``--sampling-mask-max-tokens``.
    """

    name = "sglang"
    health_path = "/health"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def describe(self, client: JsonClient, timeout_s: float) -> ServerFacts:
        reader = Reader(f"server {client.url}, /server_info", await client.get("/server_info", timeout_s=timeout_s))
        # A prompt must be shorter than this; prompt and response together may be a few tokens longer.
        return ServerFacts(max_length=int(reader.value("max_req_input_len")) - 1)

    async def generate(
        self, client: JsonClient, request: GenerationRequest, eos_token_ids: Collection[int], timeout_s: float
    ) -> ServerAnswer:
        sampling = request.sampling
        truncated = _is_truncated(sampling)
        body = {
            "input_ids": list(request.prompt_ids),
            "return_prompt_token_ids": True,
            "return_logprob": True,
            "logprob_start_len": -1,  # of the response alone
            "return_sampling_mask": truncated,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or (self._vocab_size if truncated else -1),
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": folded_seed(request.seed),
                # The server's own end-of-sequence tokens count too: "ignore_eos" would ignore these as well.
                "stop_token_ids": sorted(eos_token_ids),
            },
        }
        answer = await client.post("/generate", body, timeout_s=timeout_s)
        where = f"request {request.request_id} at {client.url}"
        reader = Reader(where, answer)
        token_ids = reader.integers("output_ids")
        finish_reason = reader.finish_reason("meta_info", "finish_reason", "type")
        if finish_reason == "stop" and isinstance(
            matched := reader.value("meta_info", "finish_reason", "matched"), str
        ):
            # Its text for logits that are not finite; it puts an end-of-sequence token where none could be drawn.
            raise RolloutError(f"{where}: position {len(token_ids) - 1}: the server stopped for {matched!r}")
        logprobs = _logprobs(where, reader, token_ids)
        return ServerAnswer(
            prompt_ids=reader.integers("prompt_token_ids"),
            token_ids=token_ids,
            logprobs=_truncated_logprobs(where, reader) if truncated else logprobs,
            finish_reason=finish_reason,
            spans=reader.spans("meta_info", "weight_versions"),
        )

    async def set_version(self, client: JsonClient, version: int, timeout_s: float) -> None:
        body = {"new_version": str(version), "abort_all_requests": False}
        await client.post("/update_weight_version", body, timeout_s=timeout_s)

    async def load_folder(self, client: JsonClient, folder: Path, version: int, timeout_s: float) -> None:
        # Requests in flight are recomputed from their tokens: nothing of the old weights' cache is kept for them.
        await client.post("/pause_generation", {"mode": "retract"}, timeout_s=timeout_s)
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        answer: Any = await client.post("/update_weights_from_disk", body, timeout_s=timeout_s)
        reader = Reader(f"server {client.url}, /update_weights_from_disk", answer)
        if reader.value("success") is not True:
            raise RolloutError(f"server {client.url}: did not take over the weights ({reader.value('message')})")
        await client.post("/continue_generation", {}, timeout_s=timeout_s)


def _is_truncated(sampling: SamplingConfig) -> bool:
    return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


def _logprobs(where: str, reader: Reader, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """The log-probabilities before truncation, each of which names its token: [[logprob, token, text], ...]."""
    path = ("meta_info", "output_token_logprobs")
    entries = reader.value(*path)
    logprobs = []
    for position in range(len(entries) if isinstance(entries, list) else 0):
        token = reader.value(*path, position, 1)
        if position < len(token_ids) and token != token_ids[position]:
            raise RolloutError(
                f"{where}: position {position} has token {token_ids[position]} but the log-probability of {token}"
            )
        logprobs.append(logprob_of(where, position, reader.value(*path, position, 0)))
    return tuple(logprobs)


def _truncated_logprobs(where: str, reader: Reader) -> tuple[float, ...]:
    """Those of the distribution that is left after top-k and top-p."""
    path = ("meta_info", "output_token_sampling_logprobs")
    entries = reader.value(*path)
    return tuple(logprob_of(where, position, entry) for position, entry in enumerate(entries or ()))
