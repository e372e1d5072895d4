import importlib.util
import json
from pathlib import Path

import pytest

from megatron.rl.config import RewardConfig
from megatron.rl.data import load_prompts
from megatron.rl.errors import RewardError
from megatron.rl.rewards import check_share, make_scorer
from megatron.rl.rewards.reasoning_gym_prompts import make_records
from megatron.rl.types import RewardItem

TOOL = Path(__file__).parents[4] / "tools" / "make_reasoning_gym_prompts.py"


class Letters:
    chat_template = None
    eos_token_id = None
    added_tokens_decoder: dict = {}

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text]

    def apply_chat_template(self, conversation, **_):
        raise AssertionError("there is no template")


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_reasoning_gym_prompts", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "countdown", "spell_backward"])
def test_from_the_tool_through_the_loader_to_a_score_of_one(tool, tmp_path, dataset):
    out = tmp_path / "new" / "prompts.jsonl"
    assert tool.main(["--dataset", dataset, "--count", "5", "--seed", "3", "--out", str(out)]) == 0
    prompts = load_prompts(str(out), Letters(), vocab_size=0x110000, max_prompt_tokens=10_000)
    assert len(prompts) == 5
    assert {prompt.source for prompt in prompts} == {dataset}
    with make_scorer(RewardConfig("reasoning-gym", workers=1, timeout_s=60)) as scorer:
        assert check_share(scorer, prompts) == {}
        assert [r.score for r in scorer.score([RewardItem(p.answer, p) for p in prompts])] == [1.0] * 5


def test_records_follow_the_seed_alone():
    assert make_records("chain_sum", 6, 1) == make_records("chain_sum", 6, 1)
    assert make_records("chain_sum", 6, 1) != make_records("chain_sum", 6, 2)
    assert json.loads(json.dumps(make_records("chain_sum", 6, 1))) == make_records("chain_sum", 6, 1)


@pytest.mark.parametrize(
    ("dataset", "count", "message"),
    [
        ("basic_aritmetic", 5, "unknown reasoning-gym data set 'basic_aritmetic'; did you mean: basic_arithmetic"),
        ("chain_sum", 0, "at least 1 problem.*got 0"),
        ("rubiks_cube", 1, "no text as answer .got None"),
        ("composite", 1, "refuses its settings"),
        ("rearc", 1, "gives its own answer a score of 0.05, not 1"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_line(tool, tmp_path, capsys, dataset, count, message):
    with pytest.raises(RewardError, match=message):
        make_records(dataset, count, 1)
    out = tmp_path / "prompts.jsonl"
    assert tool.main(["--dataset", dataset, "--count", str(count), "--seed", "1", "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


def test_settings_reach_the_data_set_and_unknown_ones_are_named(tool, tmp_path, capsys):
    out = tmp_path / "sums.jsonl"
    command = ["--dataset", "chain_sum", "--count", "30", "--out", str(out)]
    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert tool.main([*command, "--config", json.dumps(settings)]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(record["metadata"]["metadata"]["num_terms"] == 2 for record in records)
    assert tool.main([*command, "--config", '{"terms": 2}']) == 2
    assert "min_terms" in capsys.readouterr().err
    assert tool.main([*command, "--config", "["]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_excluded_problems_are_left_out(tool, tmp_path):
    held_out, train = tmp_path / "eval.jsonl", tmp_path / "train.jsonl"
    assert tool.main(["--dataset", "chain_sum", "--count", "5", "--out", str(held_out)]) == 0
    assert tool.main(["--dataset", "chain_sum", "--count", "9", "--exclude", str(held_out), "--out", str(train)]) == 0
    assert len(train.read_text().splitlines()) == 4  # the same seed gives the same first five
