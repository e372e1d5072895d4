"""The package by itself."""

import subprocess
import sys


def test_import_leaves_megatron_core_alone():
    """Arguments are read before the CPU platform can be installed, which must precede megatron.core."""
    code = "import sys, megatron.rl.weights; sys.exit('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
