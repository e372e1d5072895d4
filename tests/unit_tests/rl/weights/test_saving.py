"""Checkpoint folders: loadable by ``transformers``, whole or absent, refused where they would destroy something."""

import json
import shutil

import pytest
import torch

from megatron.rl.errors import CheckpointError
from megatron.rl.weights import save_hf_checkpoint
from tests.unit_tests.rl.weights import tiny

NAME = "qwen3-moe-unnormalised"


@pytest.fixture
def source(tmp_path):
    """A bf16 checkpoint with the files that come with one."""
    folder = tmp_path / "source"
    tiny.save_hf(NAME, folder, torch.bfloat16)
    for file in ("tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "README.md"):
        (folder / file).write_text(file)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    return folder


def _tensors(dtype=torch.float32):
    """Other weights than the source's, under the names of files."""
    from transformers.core_model_loading import revert_weight_conversion

    model = tiny.hf_model(NAME, dtype, seed=1)
    return model, revert_weight_conversion(model, model.state_dict())


def _loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("shard_bytes, files", [(5_000_000_000, 1), (20_000, None), (1, None)])
def test_transformers_loads_it(source, tmp_path, shard_bytes, files):
    model, tensors = _tensors()
    out = tmp_path / "run" / "export"
    save_hf_checkpoint(out, iter(tensors.items()), source_dir=source, max_shard_bytes=shard_bytes)
    loaded = _loaded(out)
    assert loaded.generation_config.eos_token_id == 7
    for expected, parameter in zip(model.parameters(), loaded.parameters(), strict=True):
        assert parameter.dtype == torch.float32, "config.json must not send float32 weights back to bf16"
        assert torch.equal(expected, parameter)
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    if files == 1:
        assert shards == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(shards)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        limit = max(shard_bytes, max(tensor.nbytes for tensor in tensors.values()))
        assert all((out / shard).stat().st_size < limit + 10_000 for shard in shards)
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert (out / "chat_template.jinja").exists()
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "tools"
    assert not (out / "README.md").exists(), "the source's model card describes other weights"
    assert [path.name for path in out.parent.iterdir()] == ["export"], "nothing unfinished may be left"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_stands_under_the_name_that_the_source_uses(source, tmp_path, key):
    config = {k: v for k, v in tiny.read_json(source).items() if k != "dtype"} | {key: "float32"}
    (source / "config.json").write_text(json.dumps(config))
    save_hf_checkpoint(tmp_path / "out", _tensors(torch.bfloat16)[1].items(), source_dir=source)
    assert tiny.read_json(tmp_path / "out") == {**config, key: "bfloat16"}


def test_an_earlier_export_is_replaced(source, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(source, out)
    (tmp_path / ".out.partial").mkdir()  # of a run that was killed
    model, tensors = _tensors()
    save_hf_checkpoint(out, tensors.items(), source_dir=source)
    assert torch.equal(_loaded(out).lm_head.weight, model.lm_head.weight)
    assert not (out / "README.md").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_what_is_no_checkpoint_is_left_alone(source, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="thesis: exists and is no Hugging Face checkpoint"):
        save_hf_checkpoint(tmp_path / "thesis", [], source_dir=source)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"


def test_the_source_is_not_overwritten(source):
    with pytest.raises(CheckpointError, match="own source"):
        save_hf_checkpoint(source.parent / "x" / ".." / "source", [], source_dir=source)


def test_a_source_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        save_hf_checkpoint(tmp_path / "out", [], source_dir=tmp_path)


def test_a_failure_leaves_the_old_export_and_goes_through_all_tensors(source, tmp_path, monkeypatch):
    """The tensors come from a collective: a rank that cannot write still takes part to the end."""
    from megatron.rl.weights import saving

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    out = tmp_path / "out"
    shutil.copytree(source, out)
    monkeypatch.setattr(saving, "save_file", full_disk)
    _, tensors = _tensors()
    stream = iter(tensors.items())
    with pytest.raises(CheckpointError, match="out: cannot be written .No space left"):
        save_hf_checkpoint(out, stream, source_dir=source, max_shard_bytes=1)
    assert next(stream, None) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert _loaded(out).dtype == torch.bfloat16
