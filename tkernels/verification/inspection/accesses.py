"""Where a kernel spends its time and how wide it reads there: machine instructions, their loops, their source lines."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    line: "file.py:74", the source line it came from ("" where unknown). target: the label that it may jump to.
    loads, stores: bytes that a lane moves from or to global memory. bulk: a copy of a whole tile (TMA).
    matrix: the kind of a matrix instruction.
    """

    opcode: str
    line: str = ""
    target: str = ""
    loads: int = 0
    stores: int = 0
    bulk: bool = False
    matrix: str = ""

    @property
    def reads(self) -> bool:
        """Whether it loads from global memory, a lane's bytes or a whole tile."""
        return self.loads > 0 or self.bulk


@dataclass(frozen=True)
class Code:
    """Instructions in order, and the position of the instruction after each label."""

    instructions: Sequence[Instruction]
    labels: Mapping[str, int]

    def main_loop(self) -> list[Instruction]:
        """The instructions of `main_loops`, one after the other."""
        return [one for loop in self.main_loops() for one in loop]

    def main_loops(self) -> list[list[Instruction]]:
        """The innermost loops that load from global memory, in order; none where none does.

        A loop is what lies between a label and a later jump back to it.
        """
        jumps = enumerate(self.instructions)
        loops = {range(self.labels[one.target], end + 1) for end, one in jumps if one.target in self.labels}
        loading = [loop for loop in loops if any(self.instructions[at].reads for at in loop)]
        return [[self.instructions[at] for at in loop] for loop in _innermost(loading)]

    @property
    def matrix_instructions(self) -> dict[str, int]:
        """{kind: how many there are in the code}, by kind."""
        return dict(sorted(Counter(one.matrix for one in self.instructions if one.matrix).items()))


def access_shares(loop: Sequence[Instruction]) -> dict[str, float]:
    """{width in bytes: share of the bytes that the instructions move}, widest first."""
    moved: Counter[int] = Counter()
    for one in loop:
        for width in (one.loads, one.stores):
            moved[width] += width
    total = sum(moved.values())
    return {str(width): round(moved[width] / total, 4) for width in sorted(moved, reverse=True) if width}


def _innermost(loops: Sequence[range]) -> list[range]:
    """Those in which no other lies, in order."""
    outer = {one for one in loops for other in loops if other != one and other[0] in one and other[-1] in one}
    return sorted(set(loops) - outer, key=lambda loop: loop[0])


# %k = tt.load %p, %mask, %other : tensor<64x128x!tt.ptr<bf16>> loc(#loc261)
_ACCESS = re.compile(r"\btt\.(?:load|store) .*tensor<[\dx]+x!tt\.ptr<(\w+)>.*loc\(#(\w+)\)")
_LOCATION = re.compile(r'^#(\w+) = loc\((?:"([^"]*)":(\d+):\d+|"[^"]*"\(#(\w+)\)|callsite\(#(\w+) at #(\w+)\))')
_NARROW = re.compile(r"bf16|f16|f8\w+|i8")


def source_frames(ttir: str) -> dict[str, tuple[str, ...]]:
    """loc of TTIR ("loc20" of `loc(#loc20)`) -> "path/file.py:74" of the source, and of what inlined it, outwards."""
    places: dict[str, tuple[str, tuple[str, ...]]] = {}  # loc -> (the line it is or "", the locs that it is made of)
    for text in ttir.splitlines():
        if found := _LOCATION.match(text):
            loc, file, line, named, callee, caller = found.groups()
            places[loc] = (f"{file}:{line}" if file else "", tuple(filter(None, (named, callee, caller))))

    def frames(loc: str) -> tuple[str, ...]:
        line, parts = places.get(loc, ("", ()))
        return (line,) if line else tuple(frame for part in parts for frame in frames(part))

    return {loc: frames(loc) for loc in places}


def elements_by_line(ttir: str) -> dict[str, str]:
    """ "file.py:74" -> element type ("bf16") of each line that loads or stores 8-bit numbers or 16-bit floats."""
    frames = source_frames(ttir)
    elements: dict[str, str] = {}
    for text in ttir.splitlines():
        if (found := _ACCESS.search(text)) and _NARROW.fullmatch(found.group(1)) and frames.get(found.group(2)):
            elements[frames[found.group(2)][0].rsplit("/", 1)[-1]] = found.group(1)
    return elements


def narrow_accesses(loop: Sequence[Instruction], elements: Mapping[str, str]) -> tuple[str, ...]:
    """ "file.py:74 bf16 2" for each access of `elements_by_line` that is less than 16 bytes wide."""
    found = {
        f"{one.line} {elements[one.line]} {one.loads or one.stores}"
        for one in loop
        if one.line in elements and 0 < (one.loads or one.stores) < 16
    }
    return tuple(sorted(found))
