"""Imports point downwards only, and ``megatron.rl`` is this tree's."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron" / "rl"
LEVELS = [
    {"config", "types", "errors", "quiet"},
    {"objectives", "ops", "cpu_platform"},
    {"data", "rewards", "assets"},
    {"policy", "rollout", "weights", "fp8", "metrics", "progress", "plots", "run_log"},
    {
        "runner",
        "trainer",
        "collector",
        "evaluation",
        "checkpoint",
        "optimizer_loading",
        "places",
        "patience",
        "run_prompts",
        "setup",
        "arguments",
        "argument_batching",
        "argument_group",
        "argument_checks",
        "argument_ranges",
        "flags",
        "reporting",
        "engines",
        "start_up",
        "stopping",
        "behaviour_check",
    },
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
# Pieces of one level that stand apart from each other on purpose.
APART = [("objectives", "ops"), ("rollout", "weights"), ("fp8", "policy")]
# Modules that hold Megatron's global arguments and process groups.
GLOBAL_STATE = ("megatron.training", "megatron.core.parallel_state", "megatron.core.mpu")
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported_names(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; name the module in full")
    return names


def _imported_units(path: Path) -> set[str]:
    names = _imported_names(path)
    assert "megatron.rl" not in names, f"{path}: name the module, not the package"
    return {name.split(".")[2] for name in names if name.startswith("megatron.rl.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    unit = _unit(path)
    assert unit in LEVEL_OF, f"{unit} has no level; give it one here and in CONTRIBUTING.md"
    for imported in _imported_units(path) - {unit}:
        assert imported in LEVEL_OF, f"{path} imports megatron.rl.{imported}, which does not exist"
        assert LEVEL_OF[imported] <= LEVEL_OF[unit], f"{unit} (level {LEVEL_OF[unit]}) imports {imported} above it"
        assert (unit, imported) not in APART and (imported, unit) not in APART, f"{unit} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_top_level_sees_megatrons_globals(path):
    if LEVEL_OF[_unit(path)] < len(LEVELS) - 1:
        for name in _imported_names(path):
            assert not name.startswith(GLOBAL_STATE), f"{path} imports {name}; pass it in as an argument instead"


def test_every_level_names_modules_that_exist():
    present = {_unit(path) for path in FILES}
    assert set(LEVEL_OF) <= present, sorted(set(LEVEL_OF) - present)


def test_config_needs_no_torch():
    tree = ast.parse((PACKAGE / "config.py").read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in imported if isinstance(node, ast.ImportFrom)] == ["dataclasses"]


def test_megatron_is_a_namespace_and_rl_is_ours():
    import megatron.core
    import megatron.training

    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert Path(megatron.rl.__file__).parent == PACKAGE
    assert ROOT not in Path(megatron.core.__file__).parents or ".venv" in Path(megatron.core.__file__).parts
    assert Path(megatron.training.__file__).parent.name == "training"
