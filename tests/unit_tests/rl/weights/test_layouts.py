"""Import and export in every parallel layout, against ``transformers`` and against the bytes of the files."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.rl.errors import CheckpointError
from megatron.rl.weights import export_hf_weights, load_hf_weights, read_hf_config, save_hf_checkpoint
from tests.unit_tests.distributed import run_ranks
from tests.unit_tests.rl.weights import tiny

DENSE = ("llama", "llama-tied", "llama3", "qwen2", "qwen3", "qwen3-tied-one-group")
EXPERTS = ("qwen3-moe", "qwen3-moe-unnormalised", "qwen3-moe-every-second", "qwen3-moe-one-expert")
TWO_RANKS = (
    ({"tp": 2}, (*DENSE, *EXPERTS)),  # the experts too are cut by two: ETP2
    ({"pp": 2}, ("llama", "llama-tied", "qwen3-moe-unnormalised")),
    ({"pp": 2, "vpp": 2}, ("qwen3-tied-one-group", "qwen3-moe-every-second")),
    ({"ep": 2}, EXPERTS),
    ({"tp": 2, "ep": 2, "etp": 1}, ("qwen3-moe", "qwen3-moe-unnormalised")),
)
FOUR_RANKS = (
    ({"tp": 4}, ("llama-tied", "qwen2", "qwen3-tied-one-group")),  # more ranks than key heads
    ({"tp": 2, "pp": 2}, ("llama-tied", "qwen3-moe-unnormalised")),
    ({"pp": 2, "vpp": 2, "ep": 2}, ("qwen3-moe-unnormalised",)),
    ({"tp": 2, "ep": 2, "etp": 2}, ("qwen3-moe",)),
    ({"tp": 2, "pp": 2, "ep": 2, "etp": 1}, ("qwen3-moe-every-second",)),
)


def _tokens():
    return torch.randint(0, tiny.VOCAB, (3, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One folder a family, with the log-probabilities that ``transformers`` gives on the same tokens."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in tiny.CHECKPOINTS:
        # small shards, so that the index is read and tensors of one parameter lie in several files
        model = tiny.save_hf(name, root / name, max_shard_size="8KB")
        with torch.no_grad():
            torch.save(model(_tokens()).logits.log_softmax(-1), root / name / "log_probs.pt")
    return root


@dataclass
class Outcome:
    """What one rank saw of one checkpoint in one layout."""

    case: str
    difference: float  # nat, the largest against transformers
    names: list[str]  # of the exported tensors, in order


def _assert_same_bytes(exported, folder: Path) -> None:
    in_files = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    assert len(exported) == len(in_files), "a tensor came twice or not at all"
    for name, tensor in exported:
        assert tensor.dtype == in_files[name].dtype
        assert torch.equal(tensor, in_files[name]), name


def _check(folder: Path, layout, case: str) -> Outcome:
    config = read_hf_config(folder)
    chunks = tiny.build(config, layout)
    load_hf_weights(chunks, folder, hf_config=config, pg_collection=layout.groups)
    difference = tiny.log_probs(chunks, _tokens(), layout) - torch.load(folder / "log_probs.pt")
    exported = list(export_hf_weights(chunks, hf_config=config, pg_collection=layout.groups))
    _assert_same_bytes(exported, folder)
    return Outcome(case, difference.abs().max().item(), [name for name, _ in exported])


def _run_layouts(rank: int, world_size: int, root: Path, cases) -> list[Outcome]:
    outcomes = []
    for sizes, names in cases:
        layout = tiny.initialize(**sizes)
        outcomes += [_check(root / name, layout, f"{name} {sizes}") for name in names]
    return outcomes


def _assert_equal_to_transformers(by_rank) -> None:
    for outcomes in zip(*by_rank, strict=True):
        for outcome in outcomes:
            assert outcome.difference < 1e-4, f"{outcome.case}: {outcome.difference} nat"
            assert outcome.names == outcomes[0].names, f"{outcome.case}: ranks differ in what they export, or its order"


def test_one_process(checkpoints):
    _assert_equal_to_transformers(run_ranks(1, _run_layouts, checkpoints, (({}, tuple(tiny.CHECKPOINTS)),)))


@pytest.mark.large
def test_four_processes(checkpoints):
    _assert_equal_to_transformers(run_ranks(4, _run_layouts, checkpoints, FOUR_RANKS, timeout=180))


def _save_wrapped(rank: int, world_size: int, source: Path, out: Path) -> str:
    """bf16, under half precision's and data parallelism's wrappers, loaded into the buffers they share."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    layout = tiny.initialize(tp=2, ep=2, etp=1)
    config = read_hf_config(source)
    [chunk] = tiny.build(config, layout, torch.bfloat16)
    half = Float16Module(chunk.config, chunk)
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(chunk.config, options, half, pg_collection=layout.groups)
    load_hf_weights([wrapped], source, hf_config=config, pg_collection=layout.groups)
    held = {parameter.untyped_storage().data_ptr() for parameter in wrapped.parameters()}
    buffers = (*wrapped.buffers, *wrapped.expert_parallel_buffers)
    assert held == {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}

    def export():
        return export_hf_weights([wrapped], hf_config=config, pg_collection=layout.groups)

    _assert_same_bytes(list(export()), source)
    save_hf_checkpoint(out, export(), source_dir=source, max_shard_bytes=10_000)
    (out.parent / "file").touch()
    try:
        save_hf_checkpoint(out.parent / "file" / "below", export(), source_dir=source)
    except CheckpointError as error:
        return str(error)
    return "saved where nothing can be"


def _run_two(rank: int, world_size: int, root: Path, source: Path, out: Path) -> tuple[list[Outcome], str]:
    return _run_layouts(rank, world_size, root, TWO_RANKS), _save_wrapped(rank, world_size, source, out)


@pytest.fixture(scope="module")
def two_processes(checkpoints, tmp_path_factory):
    """(by rank: outcomes of the layouts, message of a failed save), the saved folder, the model it came from."""
    folder = tmp_path_factory.mktemp("wrapped")
    model = tiny.save_hf("qwen3-moe-unnormalised", folder / "source", torch.bfloat16)
    return run_ranks(2, _run_two, checkpoints, folder / "source", folder / "out", timeout=150), folder / "out", model


def test_two_processes(two_processes):
    _assert_equal_to_transformers([outcomes for outcomes, _ in two_processes[0]])


def test_a_wrapped_bf16_model_is_saved_by_one_rank(two_processes):
    from transformers import AutoModelForCausalLM

    _, out, model = two_processes
    loaded = AutoModelForCausalLM.from_pretrained(out)
    for expected, parameter in zip(model.parameters(), loaded.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(expected, parameter)


def test_a_failed_save_is_raised_on_all_ranks(two_processes):
    messages = [message for _, message in two_processes[0]]
    assert "cannot be written" in messages[0]
    assert messages[1] == messages[0]
