"""How a vLLM server (0.32 and later) is spoken to, over its routes for tokens in and tokens out."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.rl.errors import RolloutError
from megatron.rl.rollout.http_client import JsonClient
from megatron.rl.rollout.server_api import Reader, ServerAnswer, ServerApi, ServerFacts, folded_seed, logprob_of
from megatron.rl.types import GenerationRequest

# What vLLM sends for a log-probability that is -inf or NaN.
_NOT_FINITE = -9999.0


class VllmApi(ServerApi):
    """Needs a server started with ``--enable-scale-out``, ``--logprobs-mode processed_logprobs`` and, for weight
    updates, VLLM_SERVER_DEV_MODE=1 in its environment. On CPUs its environment must hold this package: see
    ``vllm_plugin``.
    """

    name = "vllm"
    health_path = "/health"

    async def describe(self, client: JsonClient, timeout_s: float) -> ServerFacts:
        answer = await client.get("/v1/models", timeout_s=timeout_s)
        reader = Reader(f"server {client.url}, /v1/models", answer)
        return ServerFacts(max_length=int(reader.value("data", 0, "max_model_len")))

    async def generate(
        self, client: JsonClient, request: GenerationRequest, eos_token_ids: Collection[int], timeout_s: float
    ) -> ServerAnswer:
        sampling = request.sampling
        body = {
            "request_id": request.request_id,
            "token_ids": list(request.prompt_ids),
            "return_token_ids": True,
            "sampling_params": {
                "n": 1,
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": 0.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "seed": folded_seed(request.seed),
                "logprobs": 0,  # of the sampled token alone
                # Which tokens end a response is the trainer's decision, not that of the server's model folder.
                "ignore_eos": True,
                "stop_token_ids": sorted(eos_token_ids),
                "detokenize": False,
            },
        }
        answer = await client.post("/inference/v1/generate", body, timeout_s=timeout_s)
        where = f"request {request.request_id} at {client.url}"
        reader = Reader(where, answer)
        token_ids = reader.integers("choices", 0, "token_ids")
        return ServerAnswer(
            prompt_ids=reader.integers("prompt_token_ids"),
            token_ids=token_ids,
            logprobs=_logprobs(where, reader, token_ids),
            finish_reason=reader.finish_reason("choices", 0, "finish_reason"),
            spans=reader.spans("choices", 0, "weight_versions"),
        )

    async def set_version(self, client: JsonClient, version: int, timeout_s: float) -> None:
        await client.post("/update_weight_version", {"new_version": str(version)}, timeout_s=timeout_s)

    async def load_folder(self, client: JsonClient, folder: Path, version: int, timeout_s: float) -> None:
        await client.post("/pause?mode=keep", None, timeout_s=timeout_s)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await client.post("/collective_rpc", reload, timeout_s=timeout_s)
        # Requests in flight are recomputed from their tokens: nothing of the old weights' cache is kept for them.
        reset: Any = await client.post("/reset_prefix_cache?reset_running_requests=true", None, timeout_s=timeout_s)
        if Reader(f"server {client.url}, /reset_prefix_cache", reset).value("success") is not True:
            raise RolloutError(f"server {client.url}: did not flush its prefix cache after the weight update")
        await self.set_version(client, version, timeout_s)
        await client.post("/resume", None, timeout_s=timeout_s)


def _logprobs(where: str, reader: Reader, token_ids: tuple[int, ...]) -> tuple[float, ...]:
    """The sampled tokens' log-probabilities, each of which names its token."""
    path = ("choices", 0, "logprobs", "content")
    entries = reader.value(*path)
    logprobs = []
    for position in range(len(entries) if isinstance(entries, list) else 0):
        token = reader.value(*path, position, "token_id")
        if position < len(token_ids) and token != token_ids[position]:
            raise RolloutError(
                f"{where}: position {position} has token {token_ids[position]} but the log-probability of {token}"
            )
        logprob = logprob_of(where, position, reader.value(*path, position, "logprob"))
        if logprob <= _NOT_FINITE:
            raise RolloutError(
                f"{where}: position {position} (token {token}) has log-probability {logprob}, which vLLM sends for "
                f"one that is not finite; the policy has diverged or its weights are damaged"
            )
        logprobs.append(logprob)
    return tuple(logprobs)
