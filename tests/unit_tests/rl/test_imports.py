"""Imports point downwards only, and ``megatron.rl`` is this tree's."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "megatron" / "rl"
LEVELS = [
    {"config", "types", "errors"},
    {"objectives", "ops", "cpu_platform"},
    {"data", "rewards", "assets"},
    {"policy", "rollout", "weights", "fp8", "metrics", "progress", "plots", "run_log"},
    {
        "runner",
        "trainer",
        "collector",
        "evaluation",
        "checkpoint",
        "setup",
        "arguments",
        "argument_checks",
        "reporting",
        "start_up",
        "behaviour_check",
    },
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
# Pieces of one level that stand apart from each other on purpose.
APART = [("objectives", "ops"), ("rollout", "weights"), ("fp8", "policy")]
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported_units(path: Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "megatron.rl":
            names += [f"megatron.rl.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module or "")
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}: relative import; name the module in full")
    return {name.split(".")[2] for name in names if name.startswith("megatron.rl.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    unit = _unit(path)
    assert unit in LEVEL_OF, f"{unit} has no level; give it one here and in CONTRIBUTING.md"
    for imported in _imported_units(path) - {unit}:
        assert imported in LEVEL_OF, f"{path} imports megatron.rl.{imported}, which does not exist"
        assert LEVEL_OF[imported] <= LEVEL_OF[unit], f"{unit} (level {LEVEL_OF[unit]}) imports {imported} above it"
        assert (unit, imported) not in APART and (imported, unit) not in APART, f"{unit} imports {imported}"


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
