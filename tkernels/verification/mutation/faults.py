"""Faults put into a kernel's source, one at a time: what the tests of a kernel must notice.

Only what a kernel computes is touched. Performance hints (stages, cache modifiers, promises about alignment) and shapes
are left alone: the first are no faults, and a wrong shape does not compile. A fault is spliced into the text, so that a
diff of the file shows it and nothing else.
"""

import ast
import copy
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal, TypeVar

_HINT_KEYWORDS = frozenset(
    (
        "num_stages", "num_warps", "eviction_policy", "cache_modifier", "volatile", "loop_unroll_factor", "flatten",
        "warp_specialize", "disallow_acc_multi_buffer", "disable_licm", "input_precision", "sem", "scope",
    )
)  # fmt: skip
_PROMISES = frozenset(("multiple_of", "max_contiguous", "max_constancy"))
_NO_EFFECT = frozenset(
    (
        "assume", "debug_barrier", "static_assert", "device_assert", "static_print", "device_print",
        "wait_for_earlier_launches", "prefetch_rows", "prefetch_words", "prefetch_columns",
    )
)  # fmt: skip
"""What changes no value: neither a call nor, of a function of ours, its text is touched. That a kernel waits, and for
weights that it asked for, is inspection's to see."""
_MADE = ("zeros", "full")
_SHAPED = frozenset((*_MADE, "reshape", "view", "broadcast_to", "permute", "trans"))


Part = Literal["kernel", "launcher"]
"""What a fault is planted in: a device function, or host code."""


@dataclass(frozen=True)
class Mutant:
    """A source file with one fault. before, after: the expression that changed, at `line` of the original file; the
    `nth` such one of the function, from 0. source: the whole file with the fault in it.
    """

    part: Part
    kind: str
    file: Path
    function: str
    line: int
    before: str
    after: str
    nth: int
    source: str

    @property
    def name(self) -> str:
        return f"{self.function}:{self.line}: {self.kind}: {self.before} -> {self.after}"

    @property
    def diff(self) -> str:
        """The unified diff from the original file."""
        original = self.file.read_text().splitlines()
        lines = difflib.unified_diff(original, self.source.splitlines(), self.file.name, "mutant", n=1, lineterm="")
        return "\n".join(lines)


Replacement = tuple[ast.expr, ast.expr]


def called_name(node: ast.AST) -> str:
    """The last part of a called function's name: "load" of `tl.load(...)`; "" where nothing is called by name."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
            return name
    return ""


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all below it that a fault may touch: no hints, no annotations, no docstrings."""
    yield node
    name = called_name(node)
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "annotation", "returns") or name in _NO_EFFECT:
            continue
        children = value if isinstance(value, list) else [value]
        for child in children[:1] if name in _PROMISES and field == "args" else children:
            is_hint = isinstance(child, ast.keyword) and child.arg in _HINT_KEYWORDS
            if isinstance(child, ast.AST) and not is_hint:
                yield from parts_of(child)


def _body(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for statement in function.body:
        yield from parts_of(statement)


def _masks_dropped(function: ast.FunctionDef) -> Iterator[Replacement]:
    """The whole `mask=`, and each part of a mask that is a conjunction."""
    for node in _body(function):
        if isinstance(node, ast.Call) and any(keyword.arg == "mask" for keyword in node.keywords):
            bare = copy.copy(node)
            bare.keywords = [keyword for keyword in node.keywords if keyword.arg not in ("mask", "other")]
            yield node, bare
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd) and not is_number(node.right):
            yield node, node.left
            yield node, node.right


_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq
}  # fmt: skip


def _compared(function: ast.FunctionDef, other: Mapping[type[ast.cmpop], type[ast.cmpop]]) -> Iterator[Replacement]:
    for node in _body(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in other:
            yield node, ast.Compare(node.left, [other[type(node.ops[0])]()], node.comparators)


def _strides_swapped(function: ast.FunctionDef) -> Iterator[Replacement]:
    """For another stride of the same tensor, or, of a tensor that has one only, for another tensor's."""
    strides = [arg.arg for arg in function.args.args if arg.arg.startswith("stride_")]
    for node in _body(function):
        if isinstance(node, ast.Name) and node.id in strides:
            tensor = node.id.rsplit("_", 1)[0]
            others = [stride for stride in strides if stride != node.id]
            if others:
                yield node, ast.Name(min(others, key=lambda stride: stride.rsplit("_", 1)[0] != tensor))


def _axes_swapped(function: ast.FunctionDef) -> Iterator[Replacement]:
    """Of a reduction, of the grid, and of an expanded dim: x[:, None] and x[None, :]."""
    for node in _body(function):
        match node:
            case ast.Call(args=[ast.Constant() as axis]) if called_name(node) in ("program_id", "num_programs"):
                yield axis, ast.Constant(0 if axis.value else 1)
            case ast.keyword(arg="axis", value=ast.Constant() as axis):
                yield axis, ast.Constant(0 if axis.value else 1)
            case ast.Subscript(value=value, slice=ast.Tuple(elts=dims) as index):
                swapped = ast.Tuple(dims[::-1])
                if ast.unparse(swapped) != ast.unparse(index):
                    yield node, ast.Subscript(value, swapped)


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _off_by_one(function: ast.FunctionDef) -> Iterator[Replacement]:
    """A 1 that is added or subtracted is lost; an index, or the address of an access, is one too high."""
    for node in _body(function):
        match node:
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1)):
                yield node, node.left
            case ast.Call(args=[pointer, *_]) if called_name(node) in ("load", "store") or "atomic" in called_name(
                node
            ):
                yield pointer, ast.BinOp(pointer, ast.Add(), ast.Constant(1))
            case ast.Call() if called_name(node) == "arange":
                yield node, ast.BinOp(node, ast.Add(), ast.Constant(1))


def _constants_changed(function: ast.FunctionDef) -> Iterator[Replacement]:
    """A whole number is one higher, another twice itself, an infinity nothing, a mask of bits one bit short, and lanes
    that are masked off hold what undefined ones may. Axes and shapes are not constants.
    """
    fixed: set[ast.AST] = set()
    for node in _body(function):
        if node in fixed:
            fixed.update(ast.iter_child_nodes(node))
            continue
        fixed.update(_fixed_parts(node))
        match node:
            case ast.keyword(arg="other", value=ast.Constant(value=value) as lanes) if is_number(lanes):
                nan = ast.Call(ast.Name("float"), [ast.Constant("nan")], [])
                yield lanes, ast.Constant(2**31 - 1) if isinstance(value, int) else nan
            case ast.Call() if called_name(node) == "float":
                yield node, ast.Constant(0.0)
            case ast.BinOp(op=ast.BitAnd(), right=ast.Constant(value=int() as bits) as mask) if is_number(mask):
                yield mask, ast.Constant(bits // 2)
            case ast.Constant(value=int() | float() as value) if is_number(node):
                yield node, ast.Constant(value + 1 if isinstance(value, int) else 2 * value or 1.0)


def _fixed_parts(node: ast.AST) -> Iterable[ast.AST]:
    """The parts of an expression that are an axis, an index or a shape, or that change with the whole of it."""
    match node:
        case ast.Tuple() | ast.List():
            return ast.iter_child_nodes(node)
        case ast.Subscript(slice=index):
            return [index]
        case ast.keyword(arg="axis" | "dim" | "keep_dims" | "other", value=value):
            return [value] if node.arg != "other" or is_number(value) else []
        case ast.BinOp(op=ast.BitAnd(), right=right) if is_number(right):
            return [right]
        case ast.Call() if called_name(node) in ("program_id", "num_programs", "arange", "float"):
            return ast.iter_child_nodes(node)
        case ast.Call(args=args) if called_name(node) in _SHAPED:
            return args[:1] if called_name(node) in _MADE else args[1:]
    return []


def _casts_removed(function: ast.FunctionDef) -> Iterator[Replacement]:
    """Those that widen: to fp32 and to 64-bit offsets."""
    for node in _body(function):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="to"), args=[ast.Attribute(attr="float32" | "int64")]):
                yield node, value


def _accumulators_lowered(function: ast.FunctionDef) -> Iterator[Replacement]:
    """An fp32 sum that a loop carries is rounded to fp16 in every step; a 64-bit index is made with 32 bits."""
    carried: set[str] = set()
    for node in _body(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as made) if called_name(made) in _MADE:
                kinds = {part.attr: part for part in ast.walk(made) if isinstance(part, ast.Attribute)}
                if "float32" in kinds:
                    carried.add(name)
                if "int64" in kinds:
                    yield kinds["int64"], ast.Attribute(kinds["int64"].value, "int32")
    for loop in _body(function):
        if isinstance(loop, ast.For | ast.While):
            for statement in loop.body:
                yield from _rounded_sum(statement, carried)


def _rounded_sum(statement: ast.stmt, carried: Set[str]) -> Iterator[Replacement]:
    """What a step of a loop makes of a carried sum, rounded to fp16."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
            name in carried and called_name(value) not in _MADE
        ):
            yield value, _rounded(value)
        case ast.AugAssign(target=ast.Name(id=name), value=value, op=ast.Add()) if name in carried:
            # (sum + value) rounded, less the sum: what has to be added for the sum to be of fp16's precision.
            total = ast.BinOp(ast.Name(name), ast.Add(), value)
            yield value, ast.BinOp(_rounded(total), ast.Sub(), ast.Name(name))


def _rounded(value: ast.expr) -> ast.expr:
    for dtype in ("float16", "float32"):
        method = ast.Attribute(value, "to")
        value = ast.Call(method, [ast.Attribute(ast.Name("tl"), dtype)], [])
    return value


def _named(node: ast.AST, *words: str) -> bool:
    return any(isinstance(part, ast.Name) and any(word in part.id for word in words) for part in ast.walk(node))


def _scales_dropped(function: ast.FunctionDef) -> Iterator[Replacement]:
    """A factor or divisor: a scale, a weight, what rescales a running sum. Offsets are no such products."""
    for node in _body(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            is_factor = _named(node.right, "scale", "weight", "alpha") and not isinstance(node.right, ast.BinOp)
            if is_factor and not _named(node.left, "stride", "offs"):
                yield node, node.left


def _zero_points_dropped(function: ast.FunctionDef) -> Iterator[Replacement]:
    for node in _body(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _named(node.right, "zero"):
            yield node, node.left


_WEAKER_SEMANTICS = ("acquire", "release", "relaxed")


def _orders_weakened(function: ast.FunctionDef) -> Iterator[Replacement]:
    """An atomic that orders less, or for one program's threads alone; a barrier that is not there."""
    for node in _body(function):
        if isinstance(node, ast.Call) and "atomic" in called_name(node):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            semantics = ast.literal_eval(given["sem"]) if "sem" in given else "acq_rel"
            others = _WEAKER_SEMANTICS if semantics == "acq_rel" else _WEAKER_SEMANTICS[2:]
            changes = [{"sem": other} for other in others if other != semantics] + [{"scope": "cta"}]
            for change in changes:
                weaker = copy.copy(node)
                weaker.keywords = [keyword for keyword in node.keywords if keyword.arg not in change]
                weaker.keywords += [ast.keyword(name, ast.Constant(value)) for name, value in change.items()]
                yield node, weaker
        elif isinstance(node, ast.Call) and called_name(node) == "debug_barrier":
            yield node, ast.Constant(None)


ORDER_WEAKENED = "order_weakened"
"""The kind that leaves every result as it is where programs run one after the other."""

_SITES: dict[str, Callable[[ast.FunctionDef], Iterator[Replacement]]] = {
    "mask_dropped": _masks_dropped,
    "mask_shifted": partial(_compared, other=_SHIFTED),
    "comparison_flipped": partial(_compared, other=_FLIPPED),
    "stride_swapped": _strides_swapped,
    "axis_swapped": _axes_swapped,
    "off_by_one": _off_by_one,
    "constant_changed": _constants_changed,
    "cast_removed": _casts_removed,
    "accumulator_lowered": _accumulators_lowered,
    "scale_dropped": _scales_dropped,
    "zero_point_dropped": _zero_points_dropped,
    ORDER_WEAKENED: _orders_weakened,
}
KERNEL_KINDS = tuple(_SITES)

_ATOMS = ast.Name | ast.Call | ast.Subscript | ast.Attribute


def _splice(source: bytes, starts: list[int], old: ast.expr, new: ast.expr) -> str:
    """The text with one expression replaced; in parentheses, unless it needs none wherever it stands."""
    assert old.end_lineno is not None
    assert old.end_col_offset is not None
    begin = starts[old.lineno - 1] + old.col_offset
    end = starts[old.end_lineno - 1] + old.end_col_offset
    text = ast.unparse(new)
    if not (isinstance(new, _ATOMS) or is_number(new)):
        text = f"({text})"
    return (source[:begin] + text.encode() + source[end:]).decode()


Code = TypeVar("Code", bound=ast.stmt)


def mutants(file: Path, functions: frozenset[str], kinds: tuple[str, ...] = KERNEL_KINDS) -> Iterator[Mutant]:
    """Every mutant of the named device functions of a file, function by function, in the order of `kinds` and of the
    file.
    """
    text = file.read_bytes()
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef) and function.name in functions - _NO_EFFECT:
            sites = {kind: _SITES[kind] for kind in kinds}
            yield from planted("kernel", file, text, function.name, function, sites)


def planted(
    part: Part,
    file: Path,
    text: bytes,
    name: str,
    code: Code,
    sites: Mapping[str, Callable[[Code], Iterable[Replacement]]],
) -> Iterator[Mutant]:
    """Every fault that the sites find in a piece of a file's code, planted."""
    starts = [0]
    starts += [index + 1 for index, byte in enumerate(text) if byte == ord("\n")]
    for kind, find in sites.items():
        seen: dict[tuple[str, str], Iterator[int]] = {}
        for old, new in find(code):
            before, after = ast.unparse(old), ast.unparse(new)
            nth = next(seen.setdefault((before, after), count()))
            yield Mutant(part, kind, file, name, old.lineno, before, after, nth, _splice(text, starts, old, new))
