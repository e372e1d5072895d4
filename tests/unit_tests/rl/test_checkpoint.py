"""What is saved comes back, bit for bit in the same layout, and in any other."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megatron.rl import cpu_platform

cpu_platform.install()
from megatron.rl import assets, checkpoint  # noqa: E402
from megatron.rl.arguments import parse_arguments  # noqa: E402
from megatron.rl.checkpoint import Start  # noqa: E402
from megatron.rl.errors import CheckpointError  # noqa: E402
from tests.unit_tests.distributed import run_ranks  # noqa: E402
from tests.unit_tests.rl import started  # noqa: E402

# The rate of an update depends on the scheduler's state, and an eps above rounding keeps Adam's steps comparable.
FLAGS = ("--adam-eps", "1e-3", "--lr", "1e-2", "--lr-decay-style", "linear", "--lr-decay-iters", "50")
START = Start("this run", iteration=4, step=2, prompts={"position": 3, "seed": 1, "digest": "aß"})
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
    "state cut off": "iter_0000004/rl_state.json: damaged",
    "state of another version": "has no prompts, run; it is of another version",
    "counters of another": "the weights are of optimizer step 4, the counters of 6",
}
ANEW = {"finetune": ("--finetune",), "no optimizer": ("--no-load-optim",), "saved without": ("--no-load-optim",)}


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
    start: Start


def _life(folder: Path, *layout: str) -> Life:
    flags = [*FLAGS, "--save", str(folder), *layout]
    with started.started(flags) as here:
        saved = _after_update(here, seed=1)
        path = checkpoint.save_checkpoint(here.parsed.megatron, here.policy, START)
        assert Path(path).is_dir() and Path(path).parent == folder
        went_on = _after_update(here, seed=2)
    with started.started([*flags, "--load", str(folder), "--seed", "99"], load=False) as here:
        start = _start(here)
        checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
        restored = Point(_weights(here))
        resumed = _after_update(here, seed=2)
    return Life(saved, went_on, restored, resumed, start)


def _anew(folder: Path, name: str) -> tuple[Point, Point, Start]:
    """The weights of a checkpoint without its optimizer, and an update from there."""
    with started.started([*FLAGS, "--load", str(folder), *ANEW[name]], load=False) as here:
        start = _start(here)
        checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
        return Point(_weights(here)), _after_update(here, seed=2), start


def _saved_without_optimizer(folder: Path) -> str:
    """Saves the weights of the checkpoint in ``folder`` without an optimizer beside it, and tries to load it whole."""
    beside = str(folder.with_name("without optimizer"))
    with started.started(
        [*FLAGS, "--load", str(folder), "--save", beside, "--no-save-optim", "--no-save-rng"], load=False
    ) as here:
        checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
        checkpoint.save_checkpoint(here.parsed.megatron, here.policy, START)
    with started.started([*FLAGS, "--load", beside], load=False) as here:
        try:
            _start(here)
        except CheckpointError as error:
            return str(error)
    return "loaded"


def _start(here: started.Started) -> Start:
    return checkpoint.read_start(here.parsed.megatron, here.parsed.run.trainer)


@dataclass(frozen=True)
class OneRank:
    """What one rank found."""

    life: Life
    refusals: dict[str, str]
    state_first: bool
    anew: dict[str, tuple[Point, Point, Start]]


def _one_rank(rank: int, world_size: int, folder: Path) -> OneRank:
    life = _life(folder)
    with started.started([*FLAGS, "--save", str(folder)], load=False) as here:
        state_first = _state_is_there_when_megatron_saves(here)
        refusals = {name: _refusal(here, folder, name) for name in REFUSALS}
    with started.started([*FLAGS, *_other_model(folder.parent / "other")], load=False) as here:
        refusals["other model"] = _refusal(here, folder, "other model")
    refusals["without optimizer"] = _saved_without_optimizer(folder)
    places = {name: folder.with_name("without optimizer") if name == "saved without" else folder for name in ANEW}
    return OneRank(life, refusals, state_first, {name: _anew(place, name) for name, place in places.items()})


def _state_is_there_when_megatron_saves(here: started.Started) -> bool:
    """Whether the run's own state is written when Megatron's part begins: its tracker then names whole checkpoints."""
    found: list[Path] = []

    def look(iteration: int, *_: object) -> None:
        found.extend(Path(here.parsed.megatron.save).glob(f"iter_{iteration:07d}/rl_state.json"))

    with mock.patch("megatron.training.checkpointing.save_checkpoint", look):
        folder = checkpoint.save_checkpoint(here.parsed.megatron, here.policy, replace(START, iteration=3))
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
    elif name == "state cut off":
        (newest / "rl_state.json").write_text('{"run": "this')
    elif name.startswith(("state of", "counters")):
        state = json.loads((newest / "rl_state.json").read_text())
        other = {"iteration": 6} if name.startswith("counters") else {}
        kept = state if other else {key: value for key, value in state.items() if key not in ("run", "prompts")}
        (newest / "rl_state.json").write_text(json.dumps(kept | other))


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
def one_rank(folder) -> OneRank:
    return run_ranks(1, _one_rank, folder)[0]


def _differences(found: Point, expected: Point) -> list[str]:
    assert found.weights.keys() == expected.weights.keys()
    return [name for name, values in expected.weights.items() if not np.array_equal(found.weights[name], values)]


def _assert_resumed_bit_for_bit(life: Life) -> None:
    assert life.start == replace(START, goes_on=True)
    assert not _differences(life.restored, life.saved)
    assert _differences(life.went_on, life.saved)
    # optimizer state and learning-rate schedule came back too, or the next step would differ
    assert not _differences(life.resumed, life.went_on)
    for name in ("loss", "grad_norm", "learning_rate"):
        assert getattr(life.resumed, name) == getattr(life.went_on, name)
    assert life.went_on.learning_rate != life.saved.learning_rate


def test_a_resumed_run_goes_on_bit_for_bit(one_rank):
    _assert_resumed_bit_for_bit(one_rank.life)


OTHERS = {"other model": "tensor for key decoder.layers", "without optimizer": "add --no-load-optim"}


@pytest.mark.parametrize("name", [*REFUSALS, *OTHERS])
def test_what_cannot_be_resumed_is_refused_in_one_line(one_rank, name):
    message = one_rank.refusals[name]
    assert (REFUSALS | OTHERS)[name] in message
    assert name in message, "the message must name the folder"
    assert "\n" not in message and len(message) < 500


def test_the_tracker_names_whole_checkpoints_only(one_rank):
    assert one_rank.state_first


@pytest.mark.parametrize("name", ANEW)
def test_weights_go_on_without_their_optimizer_where_that_is_asked_for(one_rank, name):
    life, (weights, updated, start) = one_rank.life, one_rank.anew[name]
    assert not _differences(weights, life.saved)
    assert len(_differences(updated, life.went_on)) > 10, "Adam's moments start anew"
    assert (updated.loss, updated.grad_norm) == (life.went_on.loss, life.went_on.grad_norm)
    assert (start.iteration, start.step) == ((0, 0) if name == "finetune" else (4, 2))
    assert (start.prompts is None) == (name == "finetune")


def _two_ranks(rank: int, world_size: int, folder: Path) -> tuple[dict[str, tuple], Life, str]:
    found = {}
    for name, layout in LAYOUTS.items():
        with started.started([*FLAGS, "--load", str(folder), *layout], load=False) as here:
            checkpoint.load_checkpoint(here.parsed.megatron, here.policy)
            found[name] = _start(here).iteration, Point(_weights(here)), _after_update(here, seed=2)
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
    life = one_rank.life
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


def _saved_state(folder: Path, iteration: int, run: str = "first") -> None:
    """What :func:`read_start` reads of a checkpoint."""
    newest = folder / f"iter_{iteration:07d}"
    newest.mkdir(parents=True)
    state = {"run": run, "iteration": iteration, "step": iteration // 2, "prompts": {"position": iteration}}
    state |= {"expert_model_parallel_size": 1, "optimizer": "distributed"}
    (newest / "rl_state.json").write_text(json.dumps(state))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def _read(*flags: str) -> Start:
    parsed = parse_arguments(list(flags))
    return checkpoint.read_start(parsed.megatron, parsed.run.trainer)


def _at(folder: Path) -> tuple[str, ...]:
    return ("--load", str(folder), "--save", str(folder))


def test_a_run_keeps_its_name_where_it_goes_on_in_its_own_checkpoints(tmp_path):
    _saved_state(tmp_path / "a", 2)
    _saved_state(tmp_path / "a", 4)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    elsewhere = ("--save", str(tmp_path / "b"))
    own = [_read("--train-iters", "8", *_at(tmp_path / "a")) for _ in range(2)]
    assert [start.run for start in own] == ["first", "first"] and all(start.goes_on for start in own)
    assert (own[0].iteration, own[0].step, own[0].prompts) == (4, 2, {"position": 4})
    assert _read("--train-iters", "8", *_at(tmp_path / "a"), "--ckpt-step", "2").iteration == 2
    assert _read("--load", str(tmp_path / "link"), "--save", str(tmp_path / "a")).run == "first"
    branched = _read("--train-iters", "8", "--load", str(tmp_path / "a"), *elsewhere)
    assert branched.run != "first" and not branched.goes_on and branched.iteration == 4
    tuned = _read("--finetune", *_at(tmp_path / "a"))
    assert tuned.run != "first" and tuned == Start(tuned.run)
    assert _read().run != _read().run


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 8", None),
        ("--train-iters 6 --global-batch-size 256", None),
        ("--train-iters 4", None),  # nothing is left but the evaluation and the export
        ("--train-iters 2", "4 optimizer steps are behind it, and --train-iters 2 asks for fewer"),
        ("--train-iters 8 --global-batch-size 32", "no multiple of the 8 taken on each rollout batch now"),
        ("--train-iters 6 --grpo-iterations 3", "no multiple of the 6 taken"),
        ("--train-iters 8 --ckpt-step 3", "iter_0000003/rl_state.json is missing"),
    ],
)
def test_progress_that_does_not_fit_the_run_is_refused(tmp_path, flags, message):
    _saved_state(tmp_path, 4)
    if message is None:
        assert _read(*_at(tmp_path), *flags.split()).iteration == 4
        return
    with pytest.raises(CheckpointError) as caught:
        _read(*_at(tmp_path), *flags.split())
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_folder_of_checkpoints_in_a_run_folder_is_hinted_at(tmp_path):
    _saved_state(tmp_path / "checkpoints", 4)
    with pytest.raises(CheckpointError, match="checkpoints has some"):
        _read("--load", str(tmp_path))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_going_on_from_an_earlier_checkpoint_makes_it_the_newest(tmp_path):
    for iteration in (2, 4, 6):
        _saved_state(tmp_path, iteration)
    (tmp_path / "iter_0000008").mkdir()  # begun when the run was killed
    (tmp_path / "iter_old").mkdir()
    args = parse_arguments([*_at(tmp_path), "--ckpt-step", "4"]).megatron
    note = checkpoint.drop_later_checkpoints(args, 4)
    (aside,) = tmp_path.glob("abandoned-*")
    assert note == f"2 checkpoint(s) after optimizer step 4 are now in {aside}"
    assert _names(aside) == ["iter_0000006", "iter_0000008"]
    expected = [aside.name, "iter_0000002", "iter_0000004", "iter_old", "latest_checkpointed_iteration.txt"]
    assert _names(tmp_path) == expected
    assert _read(*_at(tmp_path), "--train-iters", "8").iteration == 4
    assert checkpoint.drop_later_checkpoints(args, 4) is None


def test_a_run_killed_while_it_goes_back_goes_back_again(tmp_path, monkeypatch):
    for iteration in (2, 4, 6):
        _saved_state(tmp_path, iteration)
    args = parse_arguments([*_at(tmp_path), "--ckpt-step", "2"]).megatron

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        checkpoint.drop_later_checkpoints(args, 2)
    assert _read(*_at(tmp_path), "--train-iters", "8").iteration == 2
    assert checkpoint.drop_later_checkpoints(args, 2) is not None
    assert "iter_0000004" not in _names(tmp_path)


def test_an_optimizer_whose_states_stand_otherwise_is_refused_before_any_work(tmp_path):
    _saved_state(tmp_path, 4)
    load = ["--load", str(tmp_path), "--run-dir", str(tmp_path / "run"), "--train-iters", "8"]
    parsed = parse_arguments([*load, "--no-use-distributed-optimizer"])
    with pytest.raises(CheckpointError, match="saved with the distributed optimizer.*--no-load-optim"):
        checkpoint.read_start(parsed.megatron, parsed.run.trainer)
    anew = parse_arguments([*load, "--no-use-distributed-optimizer", "--no-load-optim"])
    assert checkpoint.read_start(anew.megatron, anew.run.trainer).iteration == 4
