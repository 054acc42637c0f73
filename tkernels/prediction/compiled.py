"""From what inspection compiled to rows of the kept table, and from a launch to the row that stands for its kernel."""

import inspect
import json
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tkernels.contract import Axes, Case
from tkernels.device import TARGETS, DeviceFacts
from tkernels.errors import TKernelsError
from tkernels.prediction.calls import Launch, case_without_values, make_call
from tkernels.prediction.kept import CompiledFacts, count_special, match_loops
from tkernels.prediction.skeleton import skeleton_of
from tkernels.registry import Registry
from tkernels.source_hash import source_hash
from tkernels.variant import UnsupportedError, Variant
from tkernels.verification.ahead_of_time import compile_for
from tkernels.verification.inspection import sass
from tkernels.verification.inspection.rows import CompiledKernel


class NotKeptError(TKernelsError, LookupError):
    """No row of the kept table stands for a kernel as it is launched; the message says what is missing."""


Wanted = tuple[Variant, Axes]
"""A variant with kernels, and a point of its op."""

OnCompiled = Callable[[str, Sequence[CompiledKernel]], None]
"""Called with "op.variant" and the rows of inspection, after each compilation."""


def list_missing(wanted: Iterable[Wanted], facts: DeviceFacts, rows: Sequence[CompiledFacts]) -> list[Wanted]:
    """Of calls whose kernels no row is of, exactly, one for each code that they need: that in which the fewest numbers
    are 1, for which Triton makes code that is good for nothing else. Of a composed fusion its parts' calls.
    """
    found: dict[str, tuple[int, Wanted]] = {}
    queue = deque(wanted)
    cases: dict[tuple[str, frozenset[Any]], Case] = {}  # variants share an op's points, and drawing one takes a while
    while queue:
        variant, axes = queue.popleft()
        place = variant.contract.name, frozenset(axes.items())
        if place not in cases:
            cases[place] = case_without_values(variant.contract, axes)
        try:
            call = make_call(variant, cases[place], facts)
        except UnsupportedError:
            continue
        if variant.parts:
            queue.extend(call.parts)
            continue
        for launch in call.launches:
            if launch.kernel is None or _is_kept(launch, facts.arch, rows):
                continue
            code, ones = _code_key(launch), sum(value == 1 for value in launch.scalars.values())
            if code not in found or ones < found[code][0]:
                found[code] = (ones, (variant, axes))
    unique = {(id(variant), id(axes)): (variant, axes) for _, (variant, axes) in found.values()}
    return list(unique.values())


def of_todays_code(rows: Iterable[CompiledFacts], ops: Registry) -> list[CompiledFacts]:
    """The rows whose kernels are still what was compiled."""
    kernels = [kernel for op in ops.values() for one in op.variants.values() for kernel in one.kernels.values()]
    sources = {kernel.__name__: source_of(kernel) for kernel in kernels}
    return [row for row in rows if sources.get(row.kernel) == row.source]


def _is_kept(launch: Launch, arch: str, rows: Sequence[CompiledFacts]) -> bool:
    try:
        return not find_compiled(launch, arch, rows).differs
    except NotKeptError:
        return False


def _code_key(launch: Launch) -> str:
    """What its kernel is compiled for, but for numbers that are 1."""
    constant = constant_parameters(launch.kernel)
    constants = {name: value for name, value in _plain(launch.scalars).items() if name in constant or value is None}
    return json.dumps([launch.kernel.__name__, launch.config.as_dict(), constants, dict(launch.types)], sort_keys=True)


def compile_facts(
    ops: Registry, wanted: Iterable[Wanted], arch: str, on_compiled: OnCompiled = lambda name, rows: None
) -> tuple[list[CompiledFacts], list[CompiledKernel]]:
    """Compiles what calls launch, for an architecture of NVIDIA's.

    Returns:
        The rows of the kept table, and the compilations that failed.

    Raises:
        CompilationError: Nothing can be compiled here.
    """
    facts: list[CompiledFacts] = []
    failed: list[CompiledKernel] = []
    for variant, axes in wanted:
        name = f"{variant.contract.name}.{variant.name}"
        with tempfile.TemporaryDirectory() as folder:
            rows = compile_for([arch], [name], axes, ops, dump=Path(folder))
            facts += read_facts(rows, ops, Path(folder))
        failed += [row for row in rows if row.status != "ok"]
        on_compiled(name, rows)
    return facts, failed


def read_facts(rows: Iterable[CompiledKernel], ops: Registry, folder: Path) -> Iterator[CompiledFacts]:
    """A row for each compiled kernel, from its texts in `folder`; what the variant launches there says with what."""
    for row in rows:
        if row.status != "ok":
            continue
        case = case_without_values(ops[row.op].contract, row.axes)
        call = make_call(ops[row.op].variants[row.variant], case, TARGETS[row.arch])
        launch = [one for one in call.launches if one.kernel is not None][row.launch]
        stem = f"{row.op}.{row.variant}.{row.point}.{row.launch}.{row.arch}"
        parameters, skeleton = skeleton_of((folder / f"{stem}.ttir").read_text())
        code = sass.parse((folder / f"{stem}.sass").read_text())
        instructions = [one for one in code.instructions if one.opcode != "NOP"]
        looped = list({id(one): one for one in code.main_loop()}.values())
        left_out = {name: value for name, value in _plain(launch.scalars).items() if name not in parameters}
        constant = constant_parameters(launch.kernel)
        yield CompiledFacts(
            kernel=row.kernel,
            arch=row.arch,
            where=f"{row.op}.{row.variant} {row.point}",
            source=source_of(launch.kernel),
            config=launch.config.as_dict(),
            constants={name: value for name, value in left_out.items() if name in constant or value is None},
            ones=tuple(name for name, value in left_out.items() if name not in constant and value is not None),
            types=dict(launch.types),
            registers=row.registers or 0,
            shared_bytes=row.shared_bytes or 0,
            instructions=len(instructions) - len(looped),
            special=count_special(instructions) - count_special(looped),
            loops=match_loops(code, skeleton, launch.config.num_stages),
            matrix=tuple(row.matrix_instructions),
            skeleton=skeleton,
        )


def constant_parameters(kernel: Any) -> set[str]:
    """The parameters of a kernel that it declares constants."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    return {one.name for one in parameters if "constexpr" in str(one.annotation)}


@lru_cache(maxsize=256)  # it parses source
def source_of(kernel: Any) -> str:
    """The hash of a kernel's code and of what it calls."""
    return source_hash({kernel.__name__: kernel})


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON keeps them."""
    kinds = (bool, int, float, str, type(None))
    return {name: value if isinstance(value, kinds) else str(value) for name, value in values.items()}


@dataclass(frozen=True)
class Match:
    """A row that stands for a launch's kernel. differs: constant -> what it was compiled with; none, it is the same."""

    compiled: CompiledFacts
    differs: Mapping[str, Any]


def find_compiled(launch: Launch, arch: str, rows: Sequence[CompiledFacts]) -> Match:
    """The row of a launch's kernel that differs in the fewest constants; none does in source, config or dtypes.

    Raises:
        NotKeptError: There is none.
    """
    name = launch.kernel.__name__
    source, config = source_of(launch.kernel), launch.config.as_dict()
    tests = (
        (f"{name} was not compiled for {arch}", lambda row: row.kernel == name and row.arch == arch),
        (f"{name} has changed since it was compiled", lambda row: row.source == source),
        (f"{name} was not compiled with {_listed(config)}", lambda row: dict(row.config) == config),
        (f"{name} was not compiled for {_listed(launch.types)}", lambda row: dict(row.types) == dict(launch.types)),
    )
    for reason, test in tests:
        rows = [row for row in rows if test(row)]
        if not rows:
            raise NotKeptError(reason)
    now = _plain(launch.scalars)
    ones = [row for row in rows if all(now.get(name) == 1 for name in row.ones)]
    if not ones:
        raise NotKeptError(f"{name} was compiled for {', '.join(rows[0].ones)} of 1 alone")
    rows = ones
    matches = [Match(row, {k: v for k, v in row.constants.items() if now.get(k) != v}) for row in rows]
    return min(matches, key=lambda match: len(match.differs))


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "no config"
