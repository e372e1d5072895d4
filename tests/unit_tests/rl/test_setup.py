"""Megatron's start-up and the policy built by it, in several layouts and precisions."""

import os
from dataclasses import dataclass
from unittest import mock

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl import setup  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.fp8 import count_emulated_linears  # noqa: E402
from megatron.rl.policy.learner import unwrapped  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402

CASES = {
    "plain": (),
    "FP8": ("--fp8-format", "e4m3"),
    "bf16": ("--bf16",),
    "tensor 2, FP8": ("--tensor-model-parallel-size", "2", "--fp8-format", "hybrid"),
    "expert 2, FP8": ("--expert-model-parallel-size", "2", "--fp8-format", "e4m3"),
    "pipeline 2": ("--pipeline-model-parallel-size", "2"),
}


@dataclass(frozen=True)
class Built:
    """What a rank can tell of its policy."""

    vocab_size: int
    padded_rows: int | None  # of the head, on this rank; None without a head
    emulated: tuple[int, int]  # dense and expert linears
    dtype: str
    main_dtype: str  # of what the optimizer steps
    sizes: tuple[int, ...]  # data, tensor, pipeline and expert parallel
    device: str


def _built(flags: tuple[str, ...]) -> Built:
    with started.started(flags) as here:
        policy = here.policy
        [model] = unwrapped(policy.chunks)
        head = getattr(model, "output_layer", None)
        groups = policy.groups
        return Built(
            policy.vocab_size,
            head.weight.shape[0] if head is not None else None,
            count_emulated_linears(policy.chunks),
            str(next(model.parameters()).dtype),
            str(policy.optimizer.param_groups[0]["params"][0].dtype),
            tuple(group.size() for group in (groups.dp, groups.tp, groups.pp, groups.ep)),
            str(policy.device),
        )


def _on_rank(rank: int, world_size: int) -> dict[str, Built]:
    return {name: _built(flags) for name, flags in CASES.items()}


@pytest.fixture(scope="module")
def built() -> list[dict[str, Built]]:
    """Of each of two ranks."""
    return run_ranks(2, _on_rank)


def test_the_layout_is_that_of_the_flags(built):
    sizes = {name: policy.sizes for name, policy in built[0].items()}
    assert sizes["plain"] == sizes["FP8"] == (2, 1, 1, 1)
    assert sizes["tensor 2, FP8"] == (1, 2, 1, 1)
    assert sizes["expert 2, FP8"] == (2, 1, 1, 2)
    assert sizes["pipeline 2"] == (1, 1, 2, 1)
    assert {policy.device for policies in built for policy in policies.values()} == {"cpu"}


def test_the_vocabulary_is_padded_and_its_true_size_kept(built):
    assert {policy.vocab_size for policies in built for policy in policies.values()} == {53}
    assert built[0]["plain"].padded_rows == 128
    assert built[0]["tensor 2, FP8"].padded_rows == built[1]["tensor 2, FP8"].padded_rows == 128
    assert (built[0]["pipeline 2"].padded_rows, built[1]["pipeline 2"].padded_rows) == (None, 128)


def test_fp8_emulation_reaches_attention_and_experts(built):
    """Two layers with qkv and output projections, and with 8 experts of two linears each."""
    assert built[0]["plain"].emulated == built[0]["bf16"].emulated == (0, 0)
    assert built[0]["FP8"].emulated == built[0]["tensor 2, FP8"].emulated == (4, 32)
    assert built[0]["expert 2, FP8"].emulated == (4, 16)


def test_bf16_keeps_float32_main_parameters(built):
    assert (built[0]["bf16"].dtype, built[0]["bf16"].main_dtype) == ("torch.bfloat16", "torch.float32")
    assert (built[0]["plain"].dtype, built[0]["plain"].main_dtype) == ("torch.float32", "torch.float32")


def test_a_process_without_torchrun_needs_no_rendezvous():
    found = []
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        args = parse_arguments([]).megatron
        with (
            mock.patch(
                "megatron.training.initialize._initialize_distributed",
                lambda *_: found.append((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])),
            ),
            mock.patch("megatron.training.initialize._set_random_seed"),
            mock.patch("megatron.training.global_vars.set_global_variables"),
            mock.patch("megatron.core.rerun_state_machine.initialize_rerun_state_machine"),
        ):
            setup.initialize(args)
    assert found == [("127.0.0.1", "0")]
