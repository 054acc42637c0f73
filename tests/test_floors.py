"""Imports run only downward: tkernels <- tmodel <- tsched <- experiments."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FLOORS = ("tkernels", "tmodel", "tsched", "experiments")
ROOT = Path(__file__).parent.parent


def imported(file: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(str(node.module).split(".")[0])
    return names


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_only_downward(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    files = sorted((ROOT / floor).rglob("*.py"))
    assert files
    upward = {str(file): imported(file) & above for file in files}
    assert not {file: names for file, names in upward.items() if names}


def test_tkernels_needs_only_torch_triton_numpy_and_nvtx() -> None:
    allowed = set(sys.stdlib_module_names) | {"tkernels", "torch", "triton", "numpy", "nvtx"}
    for file in (ROOT / "tkernels").rglob("*.py"):
        assert imported(file) <= allowed, file


def test_no_room_is_called_utils() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rooms = {part.removesuffix(".py") for name in tracked.splitlines() for part in Path(name).parts}
    assert not rooms & {"utils", "util", "common", "helpers", "misc"}
