"""What every test process needs before torch and megatron-core are imported."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from megatron.rl import cpu_platform  # noqa: E402

cpu_platform.install()
