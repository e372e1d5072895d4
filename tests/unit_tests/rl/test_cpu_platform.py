"""The CPU platform redirects what megatron-core asks of CUDA, and nothing where CUDA is present."""

import subprocess
import sys

import pytest
import torch

from megatron.rl import cpu_platform

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform is inert where CUDA is present")


@pytest.fixture(autouse=True)
def _installed():
    assert cpu_platform.install()


def test_device_literals_land_on_the_cpu():
    for tensor in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1], device="cuda:0"),
        torch.empty_like(torch.ones(1), device=torch.device("cuda")),
        torch.ones(1).to("cuda"),
        torch.ones(1).to(device="cuda"),
        torch.ones(1).cuda(),
        torch.full((2,), 1.0, device=torch.cuda.current_device()),
    ):
        assert tensor.device.type == "cpu"


def test_device_contexts_still_reach_the_factories():
    with torch.device("meta"):
        for tensor in (torch.zeros(2), torch.empty(2), torch.tensor([1]), torch.arange(3)):
            assert tensor.device.type == "meta"


def test_streams_and_events_are_in_order():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    assert 0 <= start.elapsed_time(end) < 1e3


def test_random_states_are_the_cpus():
    from megatron.core.tensor_parallel import random as megatron_random

    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    megatron_random._set_cuda_rng_state(state)
    assert torch.equal(first, torch.rand(3))


def test_tensor_type_names_are_only_changed_inside_megatrons_optimizer():
    assert torch.zeros(1).type() == "torch.FloatTensor"
    named = cpu_platform._with_cuda_type_names(lambda x: x.type())
    assert named(torch.zeros(1)) == "torch.cuda.FloatTensor"
    assert named(torch.zeros(1, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"
    assert named(torch.zeros(1, dtype=torch.int64)) == "torch.LongTensor"
    with pytest.raises(ZeroDivisionError):
        cpu_platform._with_cuda_type_names(lambda: 1 / 0)()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_device_count_is_one_only_inside_the_block():
    before = torch.cuda.device_count()
    with cpu_platform.one_device_per_rank():
        assert torch.cuda.device_count() == 1
    assert torch.cuda.device_count() == before == 0


def test_torch_compile_is_left_alone_and_megatrons_fusions_are_not_compiled():
    from megatron.core import jit

    assert jit.jit_fuser(len) is len
    assert torch.compile is not jit.jit_fuser


def test_late_installation_is_refused():
    code = (
        "import megatron.core.jit\nfrom megatron.rl import cpu_platform\n"
        "try:\n    cpu_platform.install()\nexcept RuntimeError as e:\n    print(e)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "before the first import of megatron.core" in out.stdout


def test_nothing_is_touched_where_cuda_is_present():
    code = (
        "import torch\ntorch.cuda.is_available = lambda: True\n"
        "from megatron.rl import cpu_platform\n"
        "before = (torch.cuda.current_device, torch.Tensor.cuda, torch.zeros)\n"
        "assert cpu_platform.install() is False\n"
        "assert before == (torch.cuda.current_device, torch.Tensor.cuda, torch.zeros)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
