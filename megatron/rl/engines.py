"""Builds the rollout engine of a run: the embedded one, or one that asks servers, started here or joined."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.rl.arguments import ParsedArguments
from megatron.rl.config import RunConfig
from megatron.rl.cpu_platform import is_cpu_platform
from megatron.rl.errors import ConfigError, RolloutError
from megatron.rl.rollout.engine import RolloutEngine
from megatron.rl.rollout.hf import HFEngine
from megatron.rl.rollout.http_engine import HttpEngine
from megatron.rl.rollout.server_api import ServerApi
from megatron.rl.rollout.servers import SERVER_SPECS, ServerProcess, ServerSettings, start_servers
from megatron.rl.rollout.sglang import SglangApi
from megatron.rl.rollout.vllm import VllmApi
from megatron.rl.weights import exported_sizes, load_into_hf_model, read_eos_token_ids, save_hf_checkpoint

_SHARED_MEMORY = Path("/dev/shm")
# Each server's files are written once and read once; what one rank holds of them at a time is at most this.
_BUCKET_BYTES = 256 << 20
# vllm/v1/attention/backends/cpu_attn.py of vLLM 0.32; with others its server ends at the first request.
_VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_ROOT = Path(__file__).parents[2]


def open_engine(
    parsed: ParsedArguments, tokenizer: Any, device: torch.device, version: int, patient: dist.ProcessGroup
) -> RolloutEngine:
    """The run's engine. Its weights are those of ``--hf-model`` until the first update. Collective.

    ``patient`` is a group of all ranks, which wait in it for rank 0 as long as a server takes to start.

    Raises:
        ConfigError: the engine's environment or a place for the weights is missing.
        RolloutError: a server cannot be started or joined.
    """
    run = parsed.run
    eos = eos_token_ids(run.hf_model, tokenizer)
    if run.rollout.engine != "hf":
        return _open_servers(parsed, eos, version, patient)
    return HFEngine(
        run.hf_model,
        load_tensors=load_into_hf_model,
        eos_token_ids=eos,
        pad_token_id=pad_id(tokenizer),
        device=device,
        dtype=parsed.megatron.params_dtype,
        version=version,
    )


def eos_token_ids(folder: str, tokenizer: Any) -> list[int]:
    """The tokens that end a response: those that the model's folder names, else the tokenizer's."""
    found = read_eos_token_ids(folder)
    if not found and tokenizer.eos_token_id is None:
        raise ConfigError(f"--hf-model {folder}: neither generation_config.json nor the tokenizer names an eos token")
    return found or [tokenizer.eos_token_id]


def pad_id(tokenizer: Any) -> int:
    """Any id will do: padding is masked by position."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def describe(parsed: ParsedArguments) -> str:
    """Which engine, and where, in words."""
    rollout = parsed.run.rollout
    if rollout.engine == "hf":
        return "transformers, inside the trainer's processes"
    if rollout.urls:
        return f"{rollout.engine} at {', '.join(rollout.urls)}"
    return f"{rollout.engine}, started here; its log is {_log_dir(parsed.run)}/{rollout.engine}-0.log"


def _open_servers(parsed: ParsedArguments, eos: Sequence[int], version: int, patient: dist.ProcessGroup) -> HttpEngine:
    run, hf_config = parsed.run, parsed.hf_config
    sizes = exported_sizes(hf_config)
    sync_dir = _sync_dir(run, sum(sizes.values()) * parsed.megatron.params_dtype.itemsize)
    urls, processes = list(run.rollout.urls), _start_one(parsed, patient)
    if not urls:
        told = [processes[0].url if processes else ""]
        dist.broadcast_object_list(told, group=patient, group_src=0)
        urls = told

    def save(folder: Path, tensors: Any) -> None:
        save_hf_checkpoint(folder, tensors, source_dir=run.hf_model, max_shard_bytes=_BUCKET_BYTES, group=patient)

    try:
        return HttpEngine(
            urls,
            _api(run, hf_config.vocab_size),
            vocab_size=hf_config.vocab_size,
            max_length=hf_config.max_position_embeddings,
            eos_token_ids=eos,
            tensor_names=sizes.keys(),
            save_tensors=save,
            sync_dir=sync_dir,
            processes=processes,
            group=patient,
            version=version,
        )
    except BaseException:
        for process in processes:
            process.stop()
        raise


def _api(run: RunConfig, vocab_size: int) -> ServerApi:
    return VllmApi() if run.rollout.engine == "vllm" else SglangApi(vocab_size)


def _log_dir(run: RunConfig) -> Path:
    return Path(run.trainer.run_dir) / "servers"


def _start_one(parsed: ParsedArguments, patient: dist.ProcessGroup) -> list[ServerProcess]:
    """A server on rank 0's machine where none is to be joined; an error of its start is raised on all ranks."""
    run, args = parsed.run, parsed.megatron
    if run.rollout.urls:
        return []
    if run.rollout.engine == "vllm" and is_cpu_platform():
        _check_head_size(parsed)
    started: list[ServerProcess] = []
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        settings = ServerSettings(
            python=engine_python(run.rollout.engine),
            model_dir=Path(run.hf_model),
            dtype=str(args.params_dtype).removeprefix("torch."),
            max_length=args.max_prompt_tokens + args.max_response_tokens,
            on_cpu=is_cpu_platform(),
            seed=args.seed,
            extra=run.rollout.server_args,
        )
        try:
            started = start_servers(SERVER_SPECS[run.rollout.engine], settings, count=1, log_dir=_log_dir(run))
        except RolloutError as error:
            problem[0] = str(error)
    dist.broadcast_object_list(problem, group=patient, group_src=0)
    if problem[0] is not None:
        raise RolloutError(problem[0])
    return started


def _check_head_size(parsed: ParsedArguments) -> None:
    size = parsed.megatron.kv_channels
    if size not in _VLLM_CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, _VLLM_CPU_HEAD_SIZES))
        raise ConfigError(
            f"--rollout-engine vllm: on CPUs vLLM's attention takes heads of {sizes} dimensions; use --rollout-engine "
            f"sglang or hf for this model (got {size})"
        )


def engine_python(engine: str) -> Path:
    """The interpreter that has the engine: its own environment's beside this project, else the trainer's.

    Raises:
        ConfigError: neither has it.
    """
    own = _ROOT / f".venv-{engine}" / "bin" / "python"
    if own.exists():
        return own
    if importlib.util.find_spec(engine) is not None:
        return Path(sys.executable)
    raise ConfigError(
        f"--rollout-engine {engine}: {engine} is not installed; `make env-{engine}` makes an environment with it for "
        f"CPUs, pip install {engine} adds it to this one for GPUs, and --rollout-url joins a server elsewhere"
    )


def _sync_dir(run: RunConfig, model_bytes: int) -> Path:
    """Where weights lie while they are handed over: shared memory where all is on one machine and they fit in."""
    if run.rollout.sync_dir is not None:
        return Path(run.rollout.sync_dir)
    if os.access(_SHARED_MEMORY, os.W_OK) and shutil.disk_usage(_SHARED_MEMORY).free > 1.1 * model_bytes:
        return _SHARED_MEMORY / f"megatron-rl-{os.getuid()}"
    return Path(run.trainer.run_dir) / "weight-sync"
