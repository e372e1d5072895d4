"""One contract suite over all engines: each real server is started once, and only one is up at a time.

The servers' environments are .venv-vllm and .venv-sglang, or the folders in VLLM_ENV and SGLANG_ENV.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))

from megatron.rl import cpu_platform  # noqa: E402

cpu_platform.install()

import pytest  # noqa: E402

from tests.engine_tests.rig import MODELS, Rig, open_rig  # noqa: E402

ENGINES = ("hf", "vllm", "sglang")


@pytest.fixture(scope="session", params=[(engine, model) for engine in ENGINES for model in MODELS], ids="-".join)
def rig(request, tmp_path_factory):
    engine, model = request.param
    with open_rig(engine, model, tmp_path_factory.mktemp(f"{engine}-{model}")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def first_weights(rig: Rig):
    """Every test starts with the first weights, whatever the one before left."""
    rig.update(0)
