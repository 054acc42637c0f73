"""Imports run only downward: tkernels <- tmodel <- tsched <- experiments, and from room to room within each.

The tests mirror the floors, and so do their imports.

An import counts wherever it stands, in a function too; one under TYPE_CHECKING, which is for types alone, does not.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = ("tkernels", "tmodel", "tsched", "experiments")
ROOT = Path(__file__).parent.parent

ROOMS: dict[str, dict[str, str]] = {
    "tkernels": {
        "process": "errors cores silence mode device names files matrix_units interpreter",
        "contract": "tuning_mode config language dims overlap inputs batching contract folders source_hash workspace "
        "declaration variant",
        "launch": "ranges runtime spans recording clocks timing roofline buckets lockfile nearest tuning "
        "call_structure launch_plan launch preparation",
        "registry": "registry selection __init__",
        "isolation": "isolation footprint side_by_side trial_launch recorded_faults outside",
        "ops": "quantized ops",
        "check": "verification verification.addresses verification.untouched verification.calls verification.accuracy "
        "verification.covering verification.size_limits verification.draws verification.offsets verification.check",
        "sanitizers": "verification.sanitizers",
        "inspection": "verification.inspection verification.ahead_of_time",
        "prediction": "prediction",
        "mutation": "verification.mutation",
        "measurement": "measurement tuning_session",
    },
    "tmodel": {
        "weights": "json_files safetensors_header weights formats quantization",
        "config": "cache_kinds batch rotary fields config",
        "parts": "kv_cache kernel_axes layers kernel_swap linear_reader decoders",
        "architectures": "architectures outside loading",
        "training": "transformers_models random_weights corpus training_state expert_load train presets hub "
        "model_names",
        "quantizers": "quantizers",
        "package": "__init__",
    },
    "tsched": {
        "requests": "torch_free requests",
        "sequences": "scheduling.block_pool scheduling.sequence scheduling.window scheduling.state_slots "
        "scheduling.step_plan scheduling.refusal scheduling.token_budget scheduling.waiting_queue "
        "scheduling.sibling_groups",
        "policies": "scheduling.policies",
        "options": "options resolved_options",
        "scheduling": "scheduling",
        "execution": "execution",
        "llm": "llm async_llm",
        "serving": "serving",
        "package": "__init__",
    },
    "experiments": {
        "document": "__init__ document signals exits json_alone option_flags progress sampling",
        "simulation": "simulation",
        "serving": "serving",
        "peers": "peers",
        "schema": "schema",
        "quantization": "quantization",
        "conversion": "conversion",
        "plan": "planning",
        "runs": "runs",
        "stages": "stages",
        "sweep": "sweep",
        "reporting": "reporting",
        "profiling": "profiling",
        "gpu_report": "gpu_report",
        "foretelling": "foretelling",
        "divergence": "divergence",
        "commands": "commands cli",
    },
}
"""Package -> its rooms, from the lowest to the highest -> what is in each: modules and sub-packages, named from the
package down. A module belongs to the longest name that it is under."""


def imported_modules(file: Path) -> set[str]:
    """What a file imports from, wherever in it that stands."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(file)}


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_only_downward(floor: str) -> None:
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    files = sorted((ROOT / floor).rglob("*.py"))
    assert files
    upward = {str(file): imported(file) & above for file in files}
    assert not {file: names for file, names in upward.items() if names}


@pytest.mark.parametrize("floor", ["tkernels"])
def test_imports_of_the_tests_run_only_downward(floor: str) -> None:
    """Neither what is above their floor, nor the tests of that."""
    above = set(FLOORS[FLOORS.index(floor) + 1 :])
    files = sorted((ROOT / "tests" / floor).rglob("*.py"))
    assert files
    used = {str(file): {name.removeprefix("tests.").split(".")[0] for name in imported_modules(file)} for file in files}
    assert not {file: names & above for file, names in used.items() if names & above}


def test_tkernels_needs_only_torch_triton_numpy_nvtx_and_filelock() -> None:
    """filelock: two processes that tune record into one lockfile."""
    allowed = set(sys.stdlib_module_names) | {"tkernels", "torch", "triton", "numpy", "nvtx", "filelock"}
    for file in (ROOT / "tkernels").rglob("*.py"):
        assert imported(file) <= allowed, file


def test_no_module_imports_an_architecture_so_the_file_of_any_may_go() -> None:
    files = [file for floor in FLOORS for file in (ROOT / floor).rglob("*.py")]
    names = [file.stem for file in files if file.parent.name == "architectures" and file.stem != "__init__"]
    assert "mistral" in names
    importing = re.compile(rf"(from|import) tmodel\.architectures(\.| import .*\b)({'|'.join(names)})\b")
    assert not [str(file) for file in files if importing.search(file.read_text())]


def test_no_room_is_called_utils() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rooms = {part.removesuffix(".py") for name in tracked.splitlines() for part in Path(name).parts}
    assert not rooms & {"utils", "util", "common", "helpers", "misc"}


def modules(package: str) -> dict[str, Path]:
    """The package's modules by their names under it; the package's own is __init__."""
    found = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT / package).with_suffix("").parts
        found[".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)] = file
    return found


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module but those under `if TYPE_CHECKING`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def import_graph(package: str) -> dict[str, set[str]]:
    """Module -> the package's modules that it imports: of a name that an __init__ passes on, the module that has it."""
    files = modules(package)
    trees = {name: list(executed(ast.parse(file.read_text()))) for name, file in files.items()}
    passed_on = {
        (name, alias.asname or alias.name): f"{node.module}"
        for name, nodes in trees.items()
        if files[name].name == "__init__.py"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def module_of(dotted: str, name: str | None) -> str | None:
        if dotted != package and not dotted.startswith(f"{package}."):
            return None
        base = dotted.removeprefix(package).removeprefix(".") or "__init__"
        if name is None:
            return base
        if (inner := name if base == "__init__" else f"{base}.{name}") in files:
            return inner
        if (origin := passed_on.get((base, name))) is not None and origin != dotted:
            return module_of(origin, name) or base
        return base

    graph: dict[str, set[str]] = {}
    for module, nodes in trees.items():
        asked: set[tuple[str, str | None]] = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                asked |= {(alias.name, None) for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                asked |= {(f"{node.module}", alias.name) for alias in node.names}
        graph[module] = {found for one in asked if (found := module_of(*one)) is not None and found != module}
    return graph


def name_in_table(package: str, module: str) -> str | None:
    """The name of the table that a module is under."""
    names = [name for text in ROOMS[package].values() for name in text.split()]
    return max((name for name in names if f"{module}.".startswith(f"{name}.")), key=len, default=None)


@pytest.mark.parametrize("package", FLOORS)
def test_imports_run_only_downward_between_the_rooms(package: str) -> None:
    level = {name: place for place, text in enumerate(ROOMS[package].values()) for name in text.split()}
    upward = []
    for module, targets in import_graph(package).items():
        for target in targets:
            one, other = name_in_table(package, module), name_in_table(package, target)
            if one and other and level[one] < level[other]:
                upward.append(f"{module} -> {target}")
    assert not upward


@pytest.mark.parametrize("package", FLOORS)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    left = import_graph(package)
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        left = {module: targets for module, targets in left.items() if module not in free}
    assert not left, "modules in a circle, or above one"


@pytest.mark.parametrize("package", FLOORS)
def test_every_module_has_a_room_and_every_room_a_module(package: str) -> None:
    found = modules(package)
    assert not [module for module in found if name_in_table(package, module) is None]
    listed = {name for text in ROOMS[package].values() for name in text.split()}
    assert not listed - {str(name_in_table(package, module)) for module in found}
