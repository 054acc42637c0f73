"""What of a kernel's code decides how often each loop of it runs, and what a pass through each moves and multiplies.

Triton's first intermediate form (TTIR) is text in which control flow depends on scalars alone: program ids, the
launch's integers, numbers that are loaded from memory. A skeleton keeps these scalars, the loops and branches, and in
place of every tensor operation what it amounts to: bytes loaded and stored, and FLOPs of matrix products by operand
dtype. It is plain JSON, a few hundred bytes a kernel, and `walk` runs it in a millisecond, without Triton.

A block is a list of nodes:

    ["work", {"loads": bytes, "stores": bytes, "float32": FLOPs, ...}]
    [operation, result, *operands]                             a scalar; an operand is a name or a number
    ["for", variable, low, high, step, carried, block, number] carried: [[result, name inside, first, next], ...]
    ["while", carried, block, condition, passed, names, block, next, results]
                                                               carried: [[name inside, first], ...]; passed: on to the
                                                               second block, by `names`, and out, by `results`
    ["if", condition, then block, else block, results]         results: [[result, of then, of else], ...]

The innermost loops that load are numbered from 0 in the order of their text, which is that of the machine code's; any
other loop's number is null.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tkernels.errors import TKernelsError

Node = list[Any]
Block = list[Node]

SCALARS = {
    "extsi", "extui", "trunci", "index_cast", "addi", "subi", "muli", "divsi", "divui", "remsi", "remui", "minsi",
    "minui", "maxsi", "maxui", "andi", "ori", "xori", "shli", "shrsi", "shrui", "cmpi", "select", "ceildivsi",
    "floordivsi",
}  # fmt: skip
"""Operations of `arith` on integers that a skeleton keeps, `cmpi` with its predicate as the first operand."""

_BITS = {"i1": 8, "i8": 8, "f8": 8, "i16": 16, "f16": 16, "bf16": 16, "i32": 32, "f32": 32, "i64": 64, "f64": 64}
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i8": "int8"}

_ARGUMENT = re.compile(r"%(\w+): (!tt\.ptr<\w+>|!tt\.tensordesc<tensor<[\w]+>[^>]*>|\w+)")
_ASSIGNED = re.compile(r"^(?:%(\w+)(?::(\d+))? = )?\"?([\w.]+)\"?(.*)$")
_LOOP = re.compile(r"^(?:unsigned )?%(\w+) = %(\w+(?:#\d+)?) to %(\w+(?:#\d+)?) step %(\w+(?:#\d+)?)")
_CARRIED = re.compile(r"iter_args\((.*?)\) ->")
_OPERAND = re.compile(r"%\w+(?:#\d+)?")
_LOCATION = re.compile(r"\s*loc\((?:[^()]|\([^()]*\))*\)")  # a block's arguments have one each
_TENSOR = re.compile(r"tensor<([\dx]*x)?(?:!tt\.ptr<)?(\w+)>?")
_DOT = re.compile(r": tensor<(\d+)x(\d+)x(\w+)> \* tensor<(\d+)x(\d+)x")


class SkeletonError(TKernelsError, ValueError):
    """TTIR of a form that this reader does not know."""


def skeleton_of(ttir: str) -> tuple[dict[str, str], Block]:
    """Parameters, name -> type as TTIR has it ("i32", "!tt.ptr<bf16>"), and the skeleton of a module's only kernel.

    Raises:
        SkeletonError: The text has no kernel, or a loop of a form that is not known.
    """
    lines = [stripped for line in ttir.splitlines() if (stripped := _LOCATION.sub("", line.strip()))]
    start = next((at for at, line in enumerate(lines) if line.startswith("tt.func")), None)
    if start is None:
        raise SkeletonError("no kernel in the TTIR")
    header = next(line.strip() for line in ttir.splitlines() if line.strip().startswith("tt.func"))
    block, _, _ = _read_block(_Lines(lines[start + 1 :]))
    kept = _live(block)
    for number, loop in enumerate(loading_loops(kept)):
        loop[7] = number
    return dict(_ARGUMENT.findall(header)), kept


class _Lines:
    """Lines, and how far they are read."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines, self._at = lines, 0

    def take(self) -> str:
        if self._at == len(self._lines):
            raise SkeletonError("a block of the TTIR does not end")
        self._at += 1
        return self._lines[self._at - 1]


def _read_block(lines: _Lines) -> tuple[Block, list[str | int], str]:
    """A block up to its closing brace: its nodes, what it yields, and the line that closes it."""
    block: Block = []
    work: dict[str, float] = {}
    yields: list[str | int] = []
    while not (line := lines.take()).startswith("}"):
        found = _ASSIGNED.match(line)
        if found is None or line.startswith("^"):
            continue
        result, count, operation, rest = found.groups()
        if (reader := _READERS.get(operation)) is not None:
            block.append(reader(lines, result, int(count or 1), rest.strip()))
        elif rest.endswith("({"):
            _skip_region(lines)
        elif operation in ("scf.yield", "scf.condition"):
            yields = [*_operands(rest.partition(" : ")[0])]
        else:
            _read_operation(block, work, result, operation, rest)
    return [["work", work], *block] if work else block, yields, line


def _skip_region(lines: _Lines) -> None:
    """The inside of a reduction or a scan works on elements."""
    depth = 1
    while depth:
        line = lines.take()
        depth += line.count("{") - line.count("}")


def _operands(text: str) -> list[str]:
    return [name[1:] for name in _OPERAND.findall(text)]


def _read_loop(lines: _Lines, result: str | None, count: int, rest: str) -> Node:
    found = _LOOP.match(rest)
    if found is None:
        raise SkeletonError(f"a loop of an unknown form: {rest[:80]}")
    variable, low, high, step = found.groups()
    pairs = _CARRIED.search(rest)
    inside = re.findall(r"%(\w+) = (%\w+(?:#\d+)?)", pairs.group(1)) if pairs else []
    body, yields, _ = _read_block(lines)
    results = _results(result, count)
    carried = [
        [outer, name, first[1:], after] for outer, (name, first), after in zip(results, inside, yields, strict=False)
    ]
    return ["for", variable, low, high, step, carried, body, None]


def _read_branch(lines: _Lines, result: str | None, count: int, rest: str) -> Node:
    then, then_yields, closing = _read_block(lines)
    other, other_yields = ([], []) if "else" not in closing else _read_block(lines)[:2]
    results = [list(one) for one in zip(_results(result, count), then_yields, other_yields, strict=False)]
    return ["if", *_operands(rest)[:1], then, other, results]


_BLOCK_ARGUMENT = re.compile(r"%(\w+): ")


def _read_while(lines: _Lines, result: str | None, count: int, rest: str) -> Node:
    inside = re.findall(r"%(\w+) = (%\w+(?:#\d+)?)", rest)
    before, (condition, *passed), _ = _read_block(lines)
    names = _BLOCK_ARGUMENT.findall(lines.take())
    body, yields, _ = _read_block(lines)
    carried = [[name, first[1:]] for name, first in inside]
    # What the condition passes on, the body's arguments and the results are one list; what goes in may be another.
    return ["while", carried, before, condition, passed, names, body, yields, _results(result, count)]


_READERS = {"scf.for": _read_loop, "scf.if": _read_branch, "scf.while": _read_while}


def _results(result: str | None, count: int) -> list[str]:
    """The names by which what a loop or branch yields is used: %a, or %a#0, %a#1."""
    if result is None:
        return []
    return [result] if count == 1 else [f"{result}#{place}" for place in range(count)]


def _read_operation(block: Block, work: dict[str, float], result: str | None, operation: str, rest: str) -> None:
    """Adds a scalar to a block, or what a tensor operation amounts to to its work."""
    if amount := _work_of(operation, rest):
        what, value = amount
        work[what] = work.get(what, 0) + value
    elif result is not None and "tensor<" not in rest.rpartition(" : ")[2] and (node := _scalar(operation, rest)):
        block.append([node[0], result, *node[1:]])


_NUMBER = re.compile(r"^ (-?\d+|true|false)\b")


def _scalar(operation: str, rest: str) -> Node | None:
    """The operation and its operands; None of one that is not kept."""
    kind, _, name = operation.rpartition(".")
    names = _operands(rest.partition(" : ")[0])
    if operation == "arith.constant":
        found = _NUMBER.match(rest)
        return ["constant", int(json.loads(found[1]))] if found else None
    if operation in ("tt.get_program_id", "tt.get_num_programs"):
        return [name.removeprefix("get_"), "xyz".index(rest.strip()[0])]
    if operation in ("tt.addptr", "tt.load"):
        return [name, *names[: 2 if name == "addptr" else 1]]
    if kind == "arith" and name in SCALARS:
        return [name, *([rest.strip().partition(",")[0]] if name == "cmpi" else []), *names]
    return None


def _work_of(operation: str, rest: str) -> tuple[str, float] | None:
    """What a tensor operation amounts to; None of one that neither moves nor multiplies."""
    if operation in ("tt.dot", "tt.dot_scaled"):
        if found := _DOT.search(rest):
            rows, depth, dtype, _, columns = found.groups()
            name = _DTYPES.get(dtype, "float8_e4m3fn" if dtype.startswith("f8") else dtype)
            return name, 2.0 * int(rows) * int(depth) * int(columns)
        return None
    moves = {"tt.load": "loads", "tt.descriptor_load": "loads", "tt.store": "stores", "tt.descriptor_store": "stores"}
    if operation not in moves:
        return None
    # Of a descriptor's load the result says how much, after the arrow; of the others the last type does.
    if types := _TENSOR.findall(rest.rpartition("->")[2] or rest):
        sizes, element = types[-1]
        count = math.prod(int(size) for size in sizes.split("x") if size)
        return moves[operation], count * _bits_of(element) / 8
    return None


def _bits_of(element: str) -> int:
    return _BITS.get(element, 8 if element.startswith("f8") else 32)


def _live(block: Block) -> Block:
    """Without scalars that neither a loop's bounds nor a branch's condition follow from."""
    nodes = list(_all_nodes(block))
    live: set[str] = set()
    before = -1
    while len(live) != before:
        before = len(live)
        for node in nodes:
            live |= {name for name in _needs(node, live) if isinstance(name, str)}
    return _kept(block, live)


def _all_nodes(block: Block) -> Iterator[Node]:
    for node in block:
        yield node
        for inner in _blocks_of(node):
            yield from _all_nodes(inner)


def _blocks_of(node: Node) -> list[Block]:
    return [node[at] for at in {"for": (6,), "if": (2, 3), "while": (2, 6)}.get(node[0], ())]


def _needs(node: Node, live: set[str]) -> list[Any]:
    match node:
        case ["for", _, low, high, step, carried, *_]:
            used = [one for one in carried if one[0] in live or one[1] in live]
            return [low, high, step, *(name for one in used for name in one[1:])]
        case ["if", condition, _, _, results]:
            return [condition, *(name for one in results if one[0] in live for name in one[1:])]
        case ["while", carried, _, condition, passed, _, _, yields, _]:
            return [condition, *passed, *yields, *(name for one in carried for name in one)]
        case ["work", *_]:
            return []
        case [_, result, *operands]:
            return operands if result in live else []
    return []


def _kept(block: Block, live: set[str]) -> Block:
    found: Block = []
    for node in block:
        match node:
            case ["for", variable, low, high, step, carried, body, _]:
                kept = [one for one in carried if one[0] in live or one[1] in live]
                found.append(["for", variable, low, high, step, kept, _kept(body, live), None])
            case ["while", carried, before, condition, passed, names, body, yields, results]:
                blocks = _kept(before, live), _kept(body, live)
                found.append(["while", carried, blocks[0], condition, passed, names, blocks[1], yields, results])
            case ["if", condition, then, other, results]:
                kept = [one for one in results if one[0] in live]
                found.append(["if", condition, _kept(then, live), _kept(other, live), kept])
            case ["work", _]:
                found.append(node)
            case [_, result, *_] if result in live:
                found.append(node)
    return found


_LENGTHS = {"work": 2, "for": 8, "if": 5, "while": 9}


def is_block(value: Any) -> bool:
    """Whether a value that was read from JSON has the form of a block."""
    return isinstance(value, list) and all(map(_is_node, value))


def _is_node(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) > 1 and isinstance(value[0], str)):
        return False
    if len(value) != _LENGTHS.get(value[0], len(value)):
        return False
    if value[0] == "work":
        return isinstance(value[1], dict) and all(isinstance(amount, int | float) for amount in value[1].values())
    return all(map(is_block, _blocks_of(value)))


def loading_loops(block: Block) -> list[Node]:
    """The innermost loops that load, in the order of their text."""
    loops = [node for node in _all_nodes(block) if node[0] == "for" and _loads(node[6])]
    return [loop for loop in loops if not any(other[0] == "for" and _loads(other[6]) for other in _all_nodes(loop[6]))]


def _loads(block: Block) -> bool:
    return any(node[0] == "work" and node[1].get("loads") for node in _all_nodes(block))
