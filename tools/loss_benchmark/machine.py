"""What a figure was measured on, in words without the machine's name or folders."""

import os
import platform
import subprocess
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_CPU_INFO = Path("/proc/cpuinfo")


def describe(device: torch.device) -> dict[str, str]:
    """Processor, cores, threads, PyTorch, on a GPU that and CUDA, and the commit."""
    facts = {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
        facts["CUDA"] = str(torch.version.cuda)
    facts["commit"] = _commit()
    return facts


def _processor() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def _commit() -> str:
    """Short hash; "unknown" outside a git checkout."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return f"{commit} and changes" if _git("status", "--porcelain") else commit
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_HERE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
