"""The command lines of servers: what the contract needs, and what belongs to CPUs alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.rl.rollout.http_client import API_KEY_VARIABLE
from megatron.rl.rollout.servers.specs import SERVER_SPECS, ServerSettings

CPU = ServerSettings(Path("/env/bin/python"), Path("/model"), "float32", 100, on_cpu=True, extra=("--more", "1"))
GPU = replace(CPU, on_cpu=False, dtype="bfloat16", tensor_parallel_size=2)


@pytest.mark.parametrize("name", SERVER_SPECS)
@pytest.mark.parametrize("settings", [CPU, GPU])
def test_model_port_and_precision_are_given_and_the_users_arguments_come_last(name, settings):
    command = SERVER_SPECS[name].command(settings, 1234)
    assert command[0] == "/env/bin/python"
    assert command[-2:] == ["--more", "1"]
    for value in ("/model", "1234", settings.dtype, "127.0.0.1", str(settings.tensor_parallel_size)):
        assert value in command


def test_vllm_gives_the_probabilities_that_it_sampled_with():
    command = SERVER_SPECS["vllm"].command(GPU, 1)
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert "--enable-scale-out" in command
    assert SERVER_SPECS["vllm"].environment(GPU)["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize("name", SERVER_SPECS)
def test_on_gpus_nothing_of_the_cpus_is_left(name):
    spec = SERVER_SPECS[name]
    on_cpu = set(spec.command(CPU, 1)) | spec.environment(CPU).keys()
    on_gpu = set(spec.command(GPU, 1)) | spec.environment(GPU).keys()
    of_cpus = {"--enforce-eager", "--device", "cpu", "TORCHDYNAMO_DISABLE", "SGLANG_USE_CPU_ENGINE", "PYTHONPATH"}
    assert on_cpu & of_cpus
    assert not on_gpu & of_cpus


@pytest.mark.parametrize("name", SERVER_SPECS)
def test_a_key_never_shows_in_the_command_line(name, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "sesame")
    assert "sesame" not in " ".join(SERVER_SPECS[name].command(GPU, 1))
    if name == "vllm":
        assert SERVER_SPECS[name].environment(GPU)["VLLM_API_KEY"] == "sesame"


def test_sglangs_stand_in_for_kernels_raises_where_it_is_called(monkeypatch):
    monkeypatch.syspath_prepend(SERVER_SPECS["sglang"].environment(CPU)["PYTHONPATH"].split(":")[0])
    import sgl_kernel

    from_import = sgl_kernel.silu_and_mul
    with pytest.raises(NotImplementedError, match="sgl_kernel.silu_and_mul is a CUDA kernel"):
        from_import()
    with pytest.raises(ImportError):
        import sgl_kernel.scalar_type  # noqa: F401
