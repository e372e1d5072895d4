"""What is saved comes back, bit for bit in the same layout, and in any other."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl import assets, checkpoint  # noqa: E402
from megatron.rl.errors import CheckpointError  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402

# The rate of an update depends on the scheduler's state, and an eps above rounding keeps Adam's steps comparable.
FLAGS = ("--adam-eps", "1e-3", "--lr", "1e-2", "--lr-decay-style", "linear", "--lr-decay-iters", "50")
STATE = {"step": 7, "prompts": {"position": 3, "seed": 1, "digest": "aß"}}
EP2 = ("--expert-model-parallel-size", "2")
LAYOUTS = {
    "data 2": (),
    "tensor 2": ("--tensor-model-parallel-size", "2"),
    "pipeline 2": ("--pipeline-model-parallel-size", "2"),
}
REFUSALS = {
    "empty": "no Megatron checkpoint there",
    "foreign": "rl_state.json is missing",
    "cut off": "damaged",
    "behind its tracker": "iter_0000008/rl_state.json is missing",
    "garbage": "must hold the iteration",
}


@dataclass(frozen=True)
class Point:
    """A run at one moment."""

    weights: dict[str, np.ndarray]
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0


def _after_update(here: started.Started, seed: int) -> Point:
    result = here.update(here.learner(), started.make_samples(12, 53, seed=seed), 3)
    return Point(_weights(here), result.loss, result.grad_norm, result.learning_rate)


def _weights(here: started.Started) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in here.export().items()}


@dataclass(frozen=True)
class Life:
    """A saved run and how it went on, and the same run after a restart."""

    saved: Point
    went_on: Point
    restored: Point
    resumed: Point
    iteration: int
    state: dict


def _life(folder: Path, *layout: str) -> Life:
    flags = [*FLAGS, "--save", str(folder), *layout]
    with started.started(flags) as here:
        saved = _after_update(here, seed=1)
        path = checkpoint.save_checkpoint(here.parsed.megatron, here.policy, 4, STATE)
        assert Path(path).is_dir() and Path(path).parent == folder
        went_on = _after_update(here, seed=2)
    with started.started([*flags, "--load", str(folder), "--seed", "99"], load=False) as here:
        iteration, state = checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
        restored = Point(_weights(here))
        resumed = _after_update(here, seed=2)
    return Life(saved, went_on, restored, resumed, iteration, state)


def _one_rank(rank: int, world_size: int, folder: Path) -> tuple[Life, dict[str, str], bool]:
    life = _life(folder)
    with started.started([*FLAGS, "--save", str(folder)], load=False) as here:
        state_first = _state_is_there_when_megatron_saves(here)
        refusals = {name: _refusal(here, folder, name) for name in REFUSALS}
    with started.started([*FLAGS, *_other_model(folder.parent / "other")], load=False) as here:
        refusals["other model"] = _refusal(here, folder, "other model")
    return life, refusals, state_first


def _state_is_there_when_megatron_saves(here: started.Started) -> bool:
    """Whether the run's own state is written when Megatron's part begins: its tracker then names whole checkpoints."""
    found: list[Path] = []

    def look(iteration: int, *_: object) -> None:
        found.extend(Path(here.parsed.megatron.save).glob(f"iter_{iteration:07d}/rl_state.json"))

    with mock.patch("megatron.training.checkpointing.save_checkpoint", look):
        folder = checkpoint.save_checkpoint(here.parsed.megatron, here.policy, 3, STATE)
    shutil.rmtree(folder)
    return len(found) == 1


def _other_model(folder: Path) -> list[str]:
    """Flags of a model with half the experts."""
    shutil.copytree(assets.bundled_model_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 4}))
    limits = ["--max-prompt-tokens", "16", "--max-response-tokens", "8"]
    return ["--hf-model", str(folder), "--train-prompts", str(assets.bundled_train_prompts()), *limits]


def _damage(folder: Path, name: str) -> None:
    """Makes of a copy of a checkpoint's folder what its name says."""
    newest = folder / "iter_0000004"
    if name == "empty":
        shutil.rmtree(folder)
    elif name == "foreign":
        (newest / "rl_state.json").unlink()
    elif name == "cut off":
        data = next(newest.glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:1000])
    elif name == "behind its tracker":
        (folder / "latest_checkpointed_iteration.txt").write_text("8")
    elif name == "garbage":
        (folder / "latest_checkpointed_iteration.txt").write_text("new\nest")


def _refusal(here: started.Started, folder: Path, name: str) -> str:
    """What is said of a damaged copy of the checkpoint."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    _damage(copy, name)
    here.parsed.megatron.load = str(copy)
    try:
        checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run") / "checkpoints"


@pytest.fixture(scope="module")
def one_rank(folder) -> tuple[Life, dict[str, str], bool]:
    return run_ranks(1, _one_rank, folder)[0]


def _differences(found: Point, expected: Point) -> list[str]:
    assert found.weights.keys() == expected.weights.keys()
    return [name for name, values in expected.weights.items() if not np.array_equal(found.weights[name], values)]


def _assert_resumed_bit_for_bit(life: Life) -> None:
    assert life.iteration == 4 and life.state == STATE
    assert not _differences(life.restored, life.saved)
    assert _differences(life.went_on, life.saved)
    # optimizer state and learning-rate schedule came back too, or the next step would differ
    assert not _differences(life.resumed, life.went_on)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert getattr(life.resumed, name) == getattr(life.went_on, name)
    assert life.went_on.learning_rate != life.saved.learning_rate


def test_a_resumed_run_goes_on_bit_for_bit(one_rank):
    _assert_resumed_bit_for_bit(one_rank[0])


@pytest.mark.parametrize("name", [*REFUSALS, "other model"])
def test_what_cannot_be_resumed_is_refused_in_one_line(one_rank, name):
    message = one_rank[1][name]
    assert (REFUSALS | {"other model": "tensor for key decoder.layers"})[name] in message
    assert name in message, "the message must name the folder"
    assert "\n" not in message and len(message) < 500


def test_the_tracker_names_whole_checkpoints_only(one_rank):
    assert one_rank[2]


def _two_ranks(rank: int, world_size: int, folder: Path) -> tuple[dict[str, tuple], Life, str]:
    found = {}
    for name, layout in LAYOUTS.items():
        with started.started([*FLAGS, "--load", str(folder), *layout], load=False) as here:
            iteration, _ = checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
            found[name] = iteration, Point(_weights(here)), _after_update(here, seed=2)
    with started.started([*FLAGS, "--load", str(folder), *EP2], load=False) as here:
        try:
            checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
        except CheckpointError as error:
            refusal = str(error)
    return found, _life(folder.with_name("expert 2"), *EP2), refusal


@pytest.fixture(scope="module")
def two_ranks(one_rank, folder) -> list[tuple[dict[str, tuple], Life, str]]:
    return run_ranks(2, _two_ranks, folder)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_process_s_checkpoint_goes_on_in_another_layout(one_rank, two_ranks, layout):
    life = one_rank[0]
    for found, _, _ in two_ranks:
        iteration, restored, resumed = found[layout]
        assert iteration == 4
        assert not _differences(restored, life.saved)
        assert resumed.loss == pytest.approx(life.went_on.loss, rel=1e-5)
        assert resumed.grad_norm == pytest.approx(life.went_on.grad_norm, rel=1e-5)
        assert resumed.learning_rate == life.went_on.learning_rate
        for name, values in life.went_on.weights.items():
            step = np.linalg.norm(values - life.saved.weights[name])
            assert np.linalg.norm(resumed.weights[name] - values) <= 1e-3 * step, name


def test_expert_parallelism_resumes_itself_and_nothing_else(two_ranks):
    for _, life, refusal in two_ranks:
        _assert_resumed_bit_for_bit(life)
        assert "--expert-model-parallel-size 1" in refusal and "\n" not in refusal
