"""The side-by-side benchmark: what it reports, its exact answers and memory figures, and how mistakes end."""

import dataclasses
import json
import platform
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import benchmark_loss as tool  # noqa: E402
from loss_benchmark.inputs import exact_answer, make_inputs  # noqa: E402
from loss_benchmark.measure import errors, extra_bytes  # noqa: E402
from loss_benchmark.paths import BUILT_IN, LossPath, answer, policy_gradient_loss, require  # noqa: E402
from loss_benchmark.peers import PEERS  # noqa: E402

CPU = torch.device("cpu")
# The default chunk is ours to choose, so ours-chunk-8 is the one whose figure is known beforehand.
SMALL = ["--tokens", "24", "--hidden", "16", "--vocab", "211", "--rounds", "2", "--token-chunk", "8"]
SMALL += ["--memory-tokens", "24"]
OWN = ["ours", "ours-chunk-8"]
EVERY_PATH = [*OWN, *(path.name for path in (*BUILT_IN, *PEERS))]


@dataclasses.dataclass
class Result:
    status: int
    raw: dict
    markdown: str
    terminal: str
    folder: Path

    @property
    def paths(self) -> dict[str, dict]:
        return {path["name"]: path for path in self.raw["paths"]}


def bench(folder: Path, capsys, *arguments: str) -> Result:
    status = tool.main([*SMALL, "--output", str(folder), *arguments])
    raw = json.loads((folder / "benchmark_loss.json").read_text())
    return Result(status, raw, (folder / "benchmark_loss.md").read_text(), capsys.readouterr().out, folder)


def fake(name: str, prepare) -> LossPath:
    return LossPath(name, f"{name}.loss", name, keeps_logits=True, gemm_work=6, note="a fake", prepare=prepare)


def plain(place, factor: float = 1.0):
    def forward(hidden, weight, inputs):
        log_pi = (hidden @ weight.t()).float().log_softmax(-1)
        logprobs = log_pi.gather(1, inputs.target_ids.unsqueeze(1)).squeeze(1)
        return factor * policy_gradient_loss(logprobs, inputs), logprobs

    return forward


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_every_path_is_reported_and_right(tmp_path, capsys, dtype, bound):
    result = bench(tmp_path, capsys, "--dtype", dtype, "--memory-tokens", "24,48")
    assert result.status == 0
    assert list(result.paths) == EVERY_PATH
    for name, path in result.paths.items():
        assert f"| {name} |" in result.markdown
        assert name in result.terminal
        if path["status"] == "missing":
            assert path["reason"] in result.markdown
            continue
        assert path["status"] == "measured"
        assert len(path["seconds"]) == 2
        assert set(path["extra_bytes"]) == {"24", "48"}
        # megatron-core's fused cross entropy rounds the logits' gradient to bfloat16 whatever its inputs.
        gradient_bound = max(bound, 5e-3) if name == "mcore-fused" else bound
        assert 0 < path["errors"]["grad_hidden"] < gradient_bound
        assert 0 < path["errors"]["grad_weight"] < gradient_bound
        assert path["errors"]["logprob"] is None or path["errors"]["logprob"] < bound
    for name in ("ours", "ours-chunk-8", "torch", "mcore", "mcore-fused"):
        assert result.paths[name]["status"] == "measured"
    assert result.paths["ours-chunk-8"]["largest_chunk"] == {"24": 8, "48": 8}
    assert (tmp_path / "benchmark_loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described_without_its_name_or_folders(tmp_path, capsys):
    result = bench(tmp_path, capsys, "--peers", "torch")
    text = result.markdown + json.dumps(result.raw)
    assert {"processor", "cores", "torch", "threads", "commit"} == set(result.raw["machine"])
    assert str(ROOT) not in text
    assert str(tmp_path) not in text
    assert not platform.node() or platform.node() not in text


def test_only_the_peers_asked_for_are_measured_beside_ours(tmp_path, capsys):
    assert list(bench(tmp_path, capsys, "--peers", "mcore,torch").paths) == [*OWN, "mcore", "torch"]


def test_errors_may_have_a_vocabulary_of_their_own(tmp_path, capsys):
    result = bench(tmp_path, capsys, "--peers", "torch", "--error-vocab", "53")
    assert "a vocabulary of 53" in result.markdown
    assert result.paths["torch"]["errors"]["grad_weight"] > 0


def test_a_missing_peer_is_named_with_what_brings_it(tmp_path, capsys, monkeypatch):
    def prepare(place):
        require("no_such_peer", "pip install no-such-peer")
        return plain(place)

    def prepare_without_its_parts(place):
        import no_such_part  # noqa: F401

    monkeypatch.setattr(tool, "PEERS", (fake("absent", prepare), fake("partial", prepare_without_its_parts)))
    result = bench(tmp_path, capsys, "--peers", "absent,partial")
    assert result.status == 0
    for line in (
        "absent: missing: not installed; install it with: pip install no-such-peer",
        "partial: missing: it needs no_such_part, which is not installed",
    ):
        assert line in result.terminal
        assert line in result.markdown
    assert "| absent | missing |" in result.markdown


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_raising_peer_is_an_error_and_status_1(tmp_path, capsys, monkeypatch, calls_before):
    def prepare(place):
        calls = iter(range(calls_before))

        def forward(hidden, weight, inputs):
            if next(calls, None) is None:
                raise RuntimeError("no kernel\nin /opt/somewhere/kernel.py")
            return plain(place)(hidden, weight, inputs)

        return forward

    monkeypatch.setattr(tool, "PEERS", (fake("broken", prepare), fake("sound", plain)))
    result = bench(tmp_path, capsys, "--peers", "broken,sound")
    assert result.status == 1
    assert "broken: error: RuntimeError: no kernel in kernel.py" in result.terminal
    assert "broken: error: RuntimeError: no kernel in kernel.py" in result.markdown
    assert result.paths["sound"]["status"] == "measured"


def test_a_peer_that_is_wrong_cannot_hide_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tool, "PEERS", (fake("halved", lambda place: plain(place, 0.5)),))
    found = bench(tmp_path, capsys, "--peers", "halved", "--dtype", "float32").paths["halved"]["errors"]
    assert found["grad_hidden"] == pytest.approx(0.5, rel=1e-4)
    assert found["grad_weight"] == pytest.approx(0.5, rel=1e-4)
    assert found["logprob"] < 1e-5


@pytest.mark.parametrize("tokens", [1, 127, 300])
def test_the_exact_answer_is_autograds(tokens):
    inputs = make_inputs(tokens, 8, 53, torch.bfloat16, CPU, seed=1)
    hidden, weight = inputs.hidden.double().requires_grad_(), inputs.weight.double().requires_grad_()
    log_pi = (hidden @ weight.t()).log_softmax(-1)
    logprobs = log_pi.gather(1, inputs.target_ids.unsqueeze(1)).squeeze(1)
    gradients = torch.autograd.grad(policy_gradient_loss(logprobs, inputs), (hidden, weight))
    exact = exact_answer(inputs)
    assert exact.logprobs is not None
    torch.testing.assert_close(exact.logprobs, logprobs.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip((exact.grad_hidden, exact.grad_weight), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)  # float32 loss weights times advantages


def test_inputs_follow_the_seed():
    first, again, other = (make_inputs(5, 8, 53, torch.float32, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.target_ids, again.target_ids)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    assert (first.behavior_logprobs <= 0).all()


def test_memory_counts_what_is_held_at_once_beyond_the_result():
    def call():
        torch.empty(1 << 20, dtype=torch.uint8)  # freed at once
        scratch = torch.empty(3 << 20, dtype=torch.uint8)
        result = torch.empty(2 << 20, dtype=torch.uint8)
        del scratch
        return result

    assert extra_bytes(call, CPU) == 3 << 20


def test_the_error_of_the_plain_path_is_that_of_its_type():
    inputs = make_inputs(40, 16, 101, torch.float32, CPU, seed=3)
    found = errors(answer(plain(None), inputs), exact_answer(inputs))
    assert 0 < found.grad_hidden < 1e-6
    assert 0 < found.grad_weight < 1e-6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "torch,lighter"], "there is no 'lighter'; choose from torch, mcore"),
        (["--tokens", "-3"], "--tokens must be at least 1 (got -3)"),
        (["--token-chunk", "0"], "--token-chunk must be at least 1 (got 0)"),
        (["--error-vocab", "0"], "--error-vocab must be at least 1 (got 0)"),
        (["--vocab", "many"], "invalid int value"),
        (["--memory-tokens", "24,"], "--memory-tokens must be whole numbers from 1 on"),
        (["--memory-tokens", "0,24"], "--memory-tokens must be whole numbers from 1 on"),
        (["--dtype", "float16"], "invalid choice"),
        (["--output", __file__], "is a file; name a folder"),
    ],
)
def test_a_mistake_ends_in_one_line(capsys, arguments, words):
    assert tool.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_ends_in_one_line(capsys):
    assert tool.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda: torch sees no GPU here; use --device cpu\n"
