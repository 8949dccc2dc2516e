"""The floors of ARCHITECTURE.md: a room imports only from below, and prediction loads nothing heavy."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS: tuple[frozenset[str], ...] = tuple(frozenset(names.split()) for names in (
    "spec atomic", "report", "catalog", "inputs program foreign", "changes cost memory", "simulate mesh", "timing", "repricing", "prediction timeline",
    "waterfall solve", "advice", "comparison explain oom records formats", "render", "cli"))
"""Lowest first; rooms of one floor do not import one another."""
SHARED_CLI = ("cli.options", "cli.files", "cli.guard")
"""Pieces of the command line that every command with a run uses: they know no prediction."""
EXECUTE_MAY_USE = ("spec", "atomic", "report", "catalog", "records", "inputs", "render", *SHARED_CLI)
"""A dry run must not borrow the prediction it checks."""
EXECUTE_COMPARES = ("execute.cli", "execute.solo_command", "execute.validate", "execute.lab", "execute.compare")
"""Commands that lay a finished dry run or measurement beside the prediction."""
HEAVY = ("torch", "scipy", "textual")


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def rooms_used(path: Path) -> set[str]:
    """Rooms of costmodel that a file imports, as "room" and, within cli, "cli.piece"."""
    used = set()
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "costmodel" and len(parts) > 1 and parts[1] in ROOMS:
            used.add(".".join(parts[1:3]) if parts[1] == "cli" else parts[1])
    return used - {"cli"}


def floor(room: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room.partition(".")[0] in rooms)


ROOMS = {p.stem for p in (ROOT / "costmodel").iterdir() if (p.suffix == ".py" or (p / "__init__.py").exists()) and not p.stem.startswith("_")}
FILES = sorted((ROOT / "costmodel").rglob("*.py"))


def test_every_room_has_a_floor() -> None:
    assert {room for rooms in FLOORS for room in rooms} >= ROOMS


@pytest.mark.parametrize("path", [p for p in FILES if p.parent != ROOT / "costmodel" or not p.stem.startswith("_")], ids=module_name)
def test_a_room_imports_only_from_below(path: Path) -> None:
    room = path.relative_to(ROOT / "costmodel").with_suffix("").parts[0]
    others = {used for used in rooms_used(path) if used.partition(".")[0] != room}
    assert {used for used in others if floor(used) >= floor(room)} == set()


@pytest.mark.parametrize("piece", SHARED_CLI)
def test_the_shared_pieces_of_the_command_line_know_no_prediction(piece: str) -> None:
    used = rooms_used(ROOT / "costmodel" / Path(*piece.split(".")).with_suffix(".py"))
    assert used <= {"spec", "atomic", "report", "catalog", "inputs", "foreign", *SHARED_CLI}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_costmodel_imports_nothing_heavy_and_no_package_above_it(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports(path)}
    assert tops.isdisjoint({*HEAVY, "execute", "calibrate", "tui"})


@pytest.mark.parametrize("path", sorted((ROOT / "execute").rglob("*.py")), ids=module_name)
def test_execute_uses_no_prediction(path: Path) -> None:
    explains = module_name(path) == "execute.lab"
    allowed = {*EXECUTE_MAY_USE, *(["prediction"] if module_name(path) in EXECUTE_COMPARES else []), *(["explain"] if explains else [])}
    assert rooms_used(path) <= allowed


@pytest.mark.parametrize("path", sorted((ROOT / "tui").rglob("*.py")), ids=module_name)
def test_the_explorer_stands_on_costmodel_alone(path: Path) -> None:
    """What execute and calibrate do, it starts as a subprocess."""
    tops = {name.partition(".")[0] for name in imports(path)}
    assert tops.isdisjoint({"execute", "calibrate", "torch", "scipy"})


@pytest.mark.parametrize("path", sorted((ROOT / "calibrate").rglob("*.py")), ids=module_name)
def test_calibrate_uses_execute_only_to_measure_and_scipy_is_only_there(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imports(path)}
    measures = module_name(path) in ("calibrate.cli", "calibrate.probe.python", "calibrate.probe.run")
    assert tops.isdisjoint({"textual", "tui", "benchmarks", *(() if measures else ("execute",))})


@pytest.mark.parametrize("path", sorted((ROOT / "execute").rglob("*.py")), ids=module_name)
def test_execute_knows_nothing_of_calibrate(path: Path) -> None:
    assert {name.partition(".")[0] for name in imports(path)}.isdisjoint({"calibrate", "scipy"})


def loaded_by(code: str) -> set[str]:
    """Top-level modules in memory after running some code in a new interpreter."""
    program = f"{code}\nimport json, sys; print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_costmodel_loads_nothing_heavy() -> None:
    assert loaded_by("import costmodel").isdisjoint({*HEAVY, "pydantic", "numpy"})


def test_predicting_loads_nothing_heavy() -> None:
    loaded = loaded_by("from typer.testing import CliRunner\nfrom costmodel.cli.app import app\n"
                       "r = CliRunner().invoke(app, 'predict --params 1B --gpus 8 --zero 3'.split()); assert r.exit_code == 0, r.output")
    assert loaded.isdisjoint({*HEAVY, "yaml", "rich"})


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_by("from typer.testing import CliRunner\nfrom costmodel.cli.app import app\n"
                       "assert CliRunner().invoke(app, ['predict', '--help']).exit_code == 0")
    assert loaded.isdisjoint({*HEAVY, "yaml", "rich", "numpy"})
