"""The CUDA path of an engine, on a simulated device, against the host's: the same requests get the same tokens.

Which check catches which planted fault, and how: python -m tests.tsched.planted_path_bugs
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tkernels.simulated_streams import Pace, at_random, copies_first, late, work_first
from tests.tsched import path_checks
from tests.tsched.device_worlds import World, check_world
from tests.tsched.planted_bugs import PlantedBug
from tests.tsched.planted_path_bugs import BRANCHES, IN_PIECES, SERVED, SHARING, Branch, find_failure

CHECKS = [getattr(path_checks, name) for name in vars(path_checks) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_branch_does_what_the_hosts_does(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("world", "pace"),
    [
        (World(1, swaps=True, swap_model_at=20), late),
        (World(2, cuda_graphs=False), work_first),
        (World(3, overlap=False, swaps=True), at_random(0)),
        (World(4), copies_first),
        (World(5, swaps=True, swap_model_at=8, in_pieces=True), late),
        (World(6, in_pieces=True), work_first),
        (World(7, swaps=True, in_pieces=True), at_random(2)),
        (World(8, shares=True), late),
        (World(9, shares=True, swaps=True, cuda_graphs=False), work_first),
        (World(10, shares=True, swaps=True, in_pieces=True), at_random(3)),
    ],
)
def test_requests_get_the_tokens_of_the_host(world: World, pace: Pace) -> None:
    check_world(world, pace)


SLOW = {*SERVED, *IN_PIECES, *SHARING}
FAULTS = [
    pytest.param(branch, bug, id=bug.name, marks=[pytest.mark.slow] if SLOW & {*branch.checks} else [])
    for branch in BRANCHES
    for bug in branch.bugs
]


@pytest.mark.parametrize(("branch", "bug"), FAULTS)
def test_a_planted_fault_of_a_branch_is_caught(branch: Branch, bug: PlantedBug) -> None:
    assert find_failure(branch, bug) is not None, f"no check notices that {bug.name}"


def test_each_branch_has_three_faults_of_its_own() -> None:
    assert all(len(branch.faults) >= 3 for branch in BRANCHES)
    assert len({bug.name for branch in BRANCHES for bug in branch.bugs}) == len(FAULTS)


ROOT = Path(__file__).parent.parent.parent
CHOOSING = {
    "tsched/execution/placement.py": "finds the device, and says how much memory it has",
    "tmodel/weights.py": "reads files straight into memory of the host, before there is an engine",
}
"""Files under tsched and tmodel that may ask what a device is; all others are told, see tkernels/runtime.py."""


def asked_of_devices(tree: ast.AST) -> Iterator[str]:
    """What a module asks of a device's kind, or of CUDA itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in ("is_cuda", "is_cpu", "pin_memory", "record_stream") or (of_torch and node.attr == "cuda"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(isinstance(one, ast.Attribute) and one.attr == "type" for one in sides) and any(
                isinstance(one, ast.Constant) and one.value in ("cuda", "cpu") for one in sides
            ):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield f"line {node.value.lineno}: {ast.unparse(node)}"


def test_a_path_is_chosen_in_one_place() -> None:
    found = {
        str(file.relative_to(ROOT)): asked
        for package in ("tsched", "tmodel")
        for file in sorted((ROOT / package).rglob("*.py"))
        if (asked := list(asked_of_devices(ast.parse(file.read_text()))))
    }
    assert found.keys() == CHOOSING.keys(), found


@pytest.mark.parametrize(
    "line",
    ["x.is_cuda", "x.device.type == 'cuda'", "'cpu' != device.type", "torch.cuda.synchronize()", "x.pin_memory()",
     "torch.empty(3, pin_memory=True)"],
)  # fmt: skip
def test_what_asks_for_cuda_is_seen(line: str) -> None:
    assert list(asked_of_devices(ast.parse(line)))
    assert not list(asked_of_devices(ast.parse("x.type == 'int'; runtime.is_host; x.to(device, non_blocking=True)")))
