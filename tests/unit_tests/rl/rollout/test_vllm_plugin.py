"""vLLM can load the plugin: it is declared, and brings nothing along that vLLM's environment may not have.

What it mends is tested on a real server, in tests/engine_tests.
"""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path


def test_vllm_finds_the_plugin_by_its_entry_point():
    project = tomllib.loads((Path(__file__).resolve().parents[4] / "pyproject.toml").read_text())["project"]
    [target] = project["entry-points"]["vllm.general_plugins"].values()
    module, _, function = target.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_it_imports_nothing_of_the_trainers():
    code = (
        "import sys; before = set(sys.modules); import megatron.rl.rollout.vllm_plugin; "
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('_')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    names = {name.partition(".")[0] for name in loaded if not name.startswith("megatron.rl")}
    assert not names & {"torch", "transformers", "httpx2", "numpy", "psutil", "vllm"}
    assert "megatron.core" not in loaded
