"""The kept table of compiled kernels: what `model` needs to know of each, for any sizes that it may be launched at.

A row is of one kernel, compiled for one architecture at one config and one set of dtypes. What of it depends on sizes
is in its skeleton; so a kernel is compiled once, and its time at every point follows from the row without a compiler.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from filelock import FileLock

from tkernels.config import Config
from tkernels.files import write_text
from tkernels.prediction.skeleton import Block, is_block, loading_loops
from tkernels.verification.inspection.accesses import Code, Instruction

FOLDER = Path(__file__).parent / "kept"


@dataclass(frozen=True)
class Loop:
    """One pass through a loop, of one warp. instructions: that it issues. special: of these, exp2, rsqrt and the like.
    trips: to memory: 1 where loads go to registers, less where the loop is unrolled or copies run ahead. is_ahead: they
    do, by num_stages - 1 passes.
    """

    instructions: float
    special: float
    trips: float
    is_ahead: bool


@dataclass(frozen=True)
class CompiledFacts:
    """What a kernel was compiled to.

    where: "op.variant point" that it was compiled at. source: the hash of its code. config, constants: what it was
    compiled with. ones: parameters that were the number 1, which Triton makes constants of, so that the code is for 1
    alone. types: dtype by tensor parameter. instructions, special: of one warp, outside the loops that load. matrix:
    kinds of matrix instructions.
    """

    kernel: str
    arch: str
    where: str
    source: str
    config: Mapping[str, int]
    constants: Mapping[str, Any]
    ones: tuple[str, ...]
    types: Mapping[str, str]
    registers: int
    shared_bytes: int
    instructions: int
    special: int
    loops: tuple[Loop, ...]
    matrix: tuple[str, ...]
    skeleton: Block = field(repr=False)

    @property
    def warps(self) -> int:
        return int(self.config["num_warps"])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "loops": [[*asdict(one).values()] for one in self.loops]}

    @staticmethod
    def of(values: Any) -> "CompiledFacts":
        """The inverse of `as_json`.

        Raises:
            ValueError: It is no row; says what is wrong of it.
        """
        if not isinstance(values, dict):
            raise ValueError(f"must be an object, got {type(values).__name__}")
        names = [one.name for one in fields(CompiledFacts)]
        problems = [f"lacks {name!r}" for name in names if name not in values]
        problems += [f"has {name!r}, which no row has" for name in values if name not in names]
        problems = problems or [
            f"{name!r} must be {what}" for name, (what, fits) in _FORMS.items() if not fits(values[name])
        ]
        if problems:
            raise ValueError("; ".join(problems))
        loops = tuple(Loop(*one) for one in values["loops"])
        if len(loops) != len(loading_loops(values["skeleton"])):
            raise ValueError("'loops' must have one for each loop of 'skeleton' that loads")
        return CompiledFacts(
            **{**values, "loops": loops, "matrix": tuple(values["matrix"]), "ones": tuple(values["ones"])}
        )

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies a row."""
        parts = (self.config, self.constants, self.ones, self.types)
        return (self.kernel, self.arch, *(json.dumps(part, sort_keys=True) for part in parts))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_count(value: Any) -> bool:
    return _is_amount(value) and isinstance(value, int)


def _is_config(value: Any) -> bool:
    try:
        return isinstance(value, dict) and Config.of(value).as_dict() == value
    except (TypeError, ValueError):
        return False


def _is_loop(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(fields(Loop))
        and all(map(_is_amount, value[:-1]))
        and isinstance(value[-1], bool)
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_loops(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_loop, value))


_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("kernel", "arch", "where", "source"), ("text", _is_text)),
    **dict.fromkeys(("registers", "shared_bytes", "instructions", "special"), ("an integer from 0", _is_count)),
    **dict.fromkeys(("ones", "matrix"), ("a list of texts", _are_texts)),
    "config": ("a config", _is_config),
    "constants": ("an object", lambda value: isinstance(value, dict)),
    "types": ("an object of texts", lambda value: isinstance(value, dict) and _are_texts([*value.values()])),
    "loops": ("a list of loops", _are_loops),
    "skeleton": ("a skeleton", is_block),
}
"""Of a row's fields, as JSON: what each must be, in words and as a test."""


def table_path(arch: str) -> Path:
    return FOLDER / f"{arch}.jsonl"


_NAMED_LINES = 4


def read(path: Path) -> list[CompiledFacts]:
    """A table's rows; none where there is no such file. A warning names the lines that are no rows: they are left out,
    for what they held can be compiled again.
    """
    if not path.exists():
        return []
    rows, faults = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rows.append(CompiledFacts.of(json.loads(line)))
        except (ValueError, RecursionError) as error:  # no JSON and no UTF-8 too
            faults.append(f"line {number}: {error}")
    if faults:
        more = f"; and {len(faults) - _NAMED_LINES} lines more" if faults[_NAMED_LINES:] else ""
        said = f"{'; '.join(faults[:_NAMED_LINES])}{more}"
        # At one place, whoever reads the table: Python shows a warning of one place and text once.
        warnings.warn(f"{path}: left out: {said}; what was there is compiled again when it is needed", stacklevel=1)
    return rows


def update(path: Path, change: Callable[[list[CompiledFacts]], Iterable[CompiledFacts]]) -> None:
    """Puts what `change` makes of a table's rows in their place: a JSON line for each, sorted, the last of those with
    one key. Atomic, and safe against other processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        unique = {row.key: row for row in change(read(path))}
        write_text(path, "".join(json.dumps(unique[key].as_json()) + "\n" for key in sorted(unique)))


def add(path: Path, rows: Iterable[CompiledFacts]) -> None:
    """Adds rows to a table, each in place of the one with its key."""
    update(path, lambda before: [*before, *rows])


def match_loops(code: Code, skeleton: Block, stages: int) -> tuple[Loop, ...]:
    """A `Loop` for each numbered loop of a skeleton, from the loops of the machine code, which come in the same order.

    ptxas unrolls a short loop and appends one for the passes that are left: of such a pair the first counts, over how
    much more it loads. Of loops that overlap, which a pipeline's ends make of one, the longest counts. Where there are
    more loops still, the longest are the text's; where there are fewer, the last were unrolled into straight code.
    """
    found = _merge_remainders(_apart(code.main_loops()))
    wanted = len(loading_loops(skeleton))
    longest = sorted(range(len(found)), key=lambda at: len(found[at][0]) / found[at][1])[-wanted:] if wanted else []
    loops = [_loop(*found[at], stages) for at in sorted(longest)]
    return (*loops, *[Loop(0, 0, 0, False)] * (wanted - len(loops)))


def _apart(loops: Sequence[list[Instruction]]) -> list[list[Instruction]]:
    """Loops that have no instruction in common, the longest of those that have one."""
    apart: list[list[Instruction]] = []
    for loop in loops:
        mine = set(map(id, loop))
        if apart and not mine.isdisjoint(map(id, apart[-1])):
            apart[-1] = max(apart[-1], loop, key=len)
        else:
            apart.append(loop)
    return apart


def _merge_remainders(loops: Sequence[list[Instruction]]) -> list[tuple[list[Instruction], float]]:
    """Each loop, and how many passes of the text's one of its own is."""
    merged: list[tuple[list[Instruction], float]] = []
    for loop in loops:
        width = _width(loop)
        if merged and merged[-1][1] == 1 and width and _width(merged[-1][0]) in (2 * width, 4 * width, 8 * width):
            merged[-1] = (merged[-1][0], _width(merged[-1][0]) / width)
        else:
            merged.append((loop, 1))
    return merged


def _width(loop: Sequence[Instruction]) -> int:
    return sum(one.loads for one in loop)


def _loop(instructions: Sequence[Instruction], passes: float, stages: int) -> Loop:
    is_ahead = any(one.bulk or one.opcode.startswith("LDGSTS") for one in instructions)
    trips = 1 / max(1, stages - 1) if is_ahead else 1 / passes
    return Loop(len(instructions) / passes, count_special(instructions) / passes, trips, is_ahead)


def count_special(instructions: Sequence[Instruction]) -> int:
    return sum(one.opcode.startswith("MUFU") for one in instructions)
