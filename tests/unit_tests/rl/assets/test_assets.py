"""The bundled model and prompts are what the documentation promises."""

import json
import re
import string

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.rl import assets
from megatron.rl.errors import CheckpointError, DataError


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(assets.bundled_model_dir())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(assets.bundled_model_dir()).eval()


def read_prompts(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_prompt_has_its_right_answer():
    for path in (assets.bundled_train_prompts(), assets.bundled_eval_prompts()):
        for row in read_prompts(path):
            left, operator, right = re.fullmatch(r"(\d+)([+-])(\d+)=", row["prompt"]).groups()
            expected = int(left) + int(right) if operator == "+" else int(left) - int(right)
            assert row == {"prompt": row["prompt"], "answer": str(expected), "source": "arithmetic"}


def test_held_out_prompts_are_held_out():
    train = [row["prompt"] for row in read_prompts(assets.bundled_train_prompts())]
    held_out = [row["prompt"] for row in read_prompts(assets.bundled_eval_prompts())]
    assert len(set(train)) == len(train) == 4000
    assert len(set(held_out)) == len(held_out) == 200
    assert not set(train) & set(held_out)


def test_the_bundle_stays_small():
    files = [path for path in assets.bundled_model_dir().parent.rglob("*") if path.suffix in {".json", ".jsonl"}]
    assert assets.bundled_train_prompts().stat().st_size < 300_000
    assert (assets.bundled_model_dir() / "model.safetensors").stat().st_size < 3_000_000
    assert sum(path.stat().st_size for path in files) < 500_000


@pytest.mark.parametrize(
    "text",
    [
        "17+58=",
        "75",
        "",
        "what is 17 + 58?\n (3*4)/2 = 6.",
        "  two  spaces , and 'quotes':  ",
        string.digits + string.ascii_lowercase,
    ],
)
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer.encode("1A") == [4, tokenizer.unk_token_id]
    assert tokenizer.decode([10, 8, tokenizer.eos_token_id], skip_special_tokens=True) == "75"


def test_architecture_divides_for_every_layout(model, tokenizer):
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert config.vocab_size == len(tokenizer) == 53  # a prime: the padded vocabulary is always exercised
    assert config.num_attention_heads % 2 == config.num_key_value_heads % 2 == config.num_hidden_layers % 2 == 0
    assert (config.num_experts, config.num_experts_per_tok, config.norm_topk_prob) == (8, 2, True)
    assert config.hidden_size % 32 == config.moe_intermediate_size % 64 == 0
    assert not config.tie_word_embeddings
    assert model.dtype == torch.float32


def test_sampling_defaults_truncate_nothing(model):
    generation = model.generation_config
    assert (generation.do_sample, generation.temperature, generation.top_p, generation.top_k) == (True, 1.0, 1.0, 0)
    assert (generation.eos_token_id, generation.pad_token_id) == (1, 0)


def test_experts_are_stored_one_by_one():
    with safe_open(assets.bundled_model_dir() / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in names
    assert "model.layers.0.self_attn.q_norm.weight" in names


@torch.no_grad()
def test_sampling_solves_about_a_third(model, tokenizer):
    rows = read_prompts(assets.bundled_eval_prompts())
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    torch.manual_seed(0)
    output = model.generate(**prompts, max_new_tokens=6, num_return_sequences=8)
    responses = tokenizer.batch_decode(output[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    right = sum(text == row["answer"] for text, row in zip(responses, [r for r in rows for _ in range(8)], strict=True))
    assert 0.28 <= right / len(responses) <= 0.42


def test_a_missing_bundle_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(assets, "_FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match=r"bundled model is missing.*make_tiny_model\.py"):
        assets.bundled_model_dir()
    with pytest.raises(DataError, match=r"arithmetic_train\.jsonl.*make_tiny_model\.py"):
        assets.bundled_train_prompts()
    with pytest.raises(DataError, match=r"arithmetic_eval\.jsonl.*make_tiny_model\.py"):
        assets.bundled_eval_prompts()
