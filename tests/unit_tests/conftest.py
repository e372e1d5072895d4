"""What every test process needs before torch and megatron-core are imported."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))

from megatron.rl import cpu_platform  # noqa: E402

cpu_platform.install()
