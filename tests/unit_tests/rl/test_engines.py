"""Which engine a run gets, as far as no server is needed to tell."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.rl import cpu_platform

cpu_platform.install()

from megatron.rl import engines  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.errors import ConfigError  # noqa: E402


def parsed(*flags: str):
    return parse_arguments(list(flags))


def test_an_engine_that_is_not_installed_is_named_with_all_ways_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "_ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"make env-vllm.*pip install vllm.*--rollout-url"):
        engines.engine_python("vllm")


def test_an_engines_own_environment_comes_before_the_trainers(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "_ROOT", tmp_path)
    assert engines.engine_python("json") == Path(sys.executable)
    python = tmp_path / ".venv-json" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert engines.engine_python("json") == python


def test_a_model_that_vllm_cannot_run_on_a_cpu_is_refused_before_its_server_starts():
    with pytest.raises(ConfigError, match=r"heads of 32, 64.*\(got 16\)"):
        engines._check_head_size(parsed("--rollout-engine", "vllm"))


def test_weights_go_through_shared_memory_where_they_fit_in(monkeypatch, tmp_path):
    run = parsed("--rollout-engine", "sglang", "--run-dir", str(tmp_path)).run
    monkeypatch.setattr(engines, "_SHARED_MEMORY", tmp_path)
    assert engines._sync_dir(run, 1000).parent == tmp_path
    assert engines._sync_dir(run, 1 << 60) == tmp_path / "weight-sync"
    named = parsed("--rollout-engine", "sglang", "--weight-sync-dir", "/elsewhere").run
    assert engines._sync_dir(named, 1000) == Path("/elsewhere")


def test_the_start_up_says_where_responses_come_from():
    assert engines.describe(parsed()) == "transformers, inside the trainer's processes"
    urls = "http://a:1,http://b:2"
    assert (
        engines.describe(parsed("--rollout-engine", "vllm", "--rollout-url", urls)) == "vllm at http://a:1, http://b:2"
    )


@pytest.mark.parametrize(
    ("named", "tokenizer_eos", "expected"), [([7, 9], 1, [7, 9]), ([0], 1, [0]), ([7], None, [7]), ([], 0, [0])]
)
def test_responses_end_at_the_models_own_tokens(monkeypatch, named, tokenizer_eos, expected):
    monkeypatch.setattr(engines, "read_eos_token_ids", lambda folder: named)
    assert engines.eos_token_ids("folder", SimpleNamespace(eos_token_id=tokenizer_eos)) == expected


def test_a_model_without_an_end_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names an eos token"):
        engines.eos_token_ids(str(tmp_path), SimpleNamespace(eos_token_id=None))


@pytest.mark.parametrize(("pad", "eos", "expected"), [(3, 1, 3), (None, 1, 1), (None, None, 0), (0, 1, 0)])
def test_any_token_can_pad(pad, eos, expected):
    assert engines.pad_id(SimpleNamespace(pad_token_id=pad, eos_token_id=eos)) == expected
