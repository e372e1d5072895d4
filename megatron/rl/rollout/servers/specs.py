"""What starts each kind of server: command line, environment variables, health route."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.rl.rollout.http_client import API_KEY_VARIABLE

SERVED_NAME = "policy"
# Modules that stand in, on machines without a GPU, for what a server imports and never calls there.
_CPU_MODULES = Path(__file__).with_name("cpu_modules")
_CPU_CACHE_GIB = 1
_CPU_CACHE_TOKENS = 20_000
# SGLang keeps some positions of its context to itself, and refuses longer prompts.
_SGLANG_SPARE_TOKENS = 8


@dataclass(frozen=True)
class ServerSettings:
    """What a server is to serve, and with what."""

    python: Path  # interpreter of the environment that holds the engine
    model_dir: Path  # Hugging Face checkpoint folder
    dtype: str  # "float32" or "bfloat16"
    max_length: int  # longest prompt plus response, in tokens
    on_cpu: bool
    seed: int = 0
    tensor_parallel_size: int = 1
    extra: tuple[str, ...] = ()  # further arguments, the engine's own


@dataclass(frozen=True)
class ServerSpec:
    """One kind of server."""

    name: str
    health_path: str
    _arguments: Callable[[ServerSettings, int], list[str]]
    _environment: Callable[[ServerSettings], dict[str, str]]

    def command(self, settings: ServerSettings, port: int) -> list[str]:
        """The command line, its program first."""
        return [str(settings.python), *self._arguments(settings, port), *settings.extra]

    def environment(self, settings: ServerSettings) -> Mapping[str, str]:
        """Variables to add to those of the trainer."""
        return {"HF_HUB_OFFLINE": "1", **self._environment(settings)}


def _vllm_arguments(settings: ServerSettings, port: int) -> list[str]:
    arguments = [
        *("-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", str(settings.model_dir.resolve()), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", settings.dtype, "--max-model-len", str(settings.max_length), "--seed", str(settings.seed)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        # The default ignores the temperature.
        *("--logprobs-mode", "processed_logprobs"),
        # Token ids in and out, with the policy version of each token.
        "--enable-scale-out",
        "--skip-tokenizer-init",
        # generation_config.json would change how is sampled.
        *("--generation-config", "vllm"),
        "--disable-uvicorn-access-log",
    ]
    return arguments + (["--enforce-eager"] if settings.on_cpu else [])


def _vllm_environment(settings: ServerSettings) -> dict[str, str]:
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause, update weights and resume
    }
    if key := os.environ.get(API_KEY_VARIABLE):
        variables["VLLM_API_KEY"] = key
    if settings.on_cpu:
        # Compilation costs 14 to 19 s at the first request and gains nothing for small models.
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(_CPU_CACHE_GIB), "TORCHDYNAMO_DISABLE": "1"}
    return variables


def _sglang_arguments(settings: ServerSettings, port: int) -> list[str]:
    arguments = [
        *("-m", "sglang.launch_server"),
        *("--model-path", str(settings.model_dir.resolve()), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", settings.dtype, "--context-length", str(settings.max_length + _SGLANG_SPARE_TOKENS)),
        *("--random-seed", str(settings.seed), "--tp-size", str(settings.tensor_parallel_size)),
        "--skip-tokenizer-init",
        *("--sampling-defaults", "openai"),  # generation_config.json would change how is sampled
        "--skip-server-warmup",
    ]
    if settings.on_cpu:
        arguments += [
            *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--disable-overlap-schedule", "--disable-cuda-graph", "--mem-fraction-static", "0.2"),
            *("--max-total-tokens", str(_CPU_CACHE_TOKENS)),
        ]
    return arguments


def _sglang_environment(settings: ServerSettings) -> dict[str, str]:
    # A context longer than the model's by the spare tokens, which are never used.
    variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if not settings.on_cpu:
        return variables
    path = os.pathsep.join(filter(None, (str(_CPU_MODULES), os.environ.get("PYTHONPATH"))))
    return variables | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": path}


SERVER_SPECS = {
    "vllm": ServerSpec("vllm", "/health", _vllm_arguments, _vllm_environment),
    "sglang": ServerSpec("sglang", "/health", _sglang_arguments, _sglang_environment),
}
