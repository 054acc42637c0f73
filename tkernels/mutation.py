"""Faults put into a kernel's source, one at a time: what the tests of a kernel must notice.

A mutant is a whole variant file, so that it runs like any outside variant.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

KINDS = ("mask_removed", "stride_swapped", "off_by_one", "scale_dropped", "zero_point_dropped", "int64_removed")


@dataclass(frozen=True)
class Mutant:
    """A variant file with one fault. before, after: the expression that changed, at `line` of the original file."""

    kind: str
    kernel: str
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.kernel}:{self.line}:{self.kind}: {self.before} -> {self.after}"


Replacement = tuple[ast.AST, ast.AST]


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list)


def _masks_removed(function: ast.FunctionDef) -> Iterator[Replacement]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and any(keyword.arg == "mask" for keyword in node.keywords):
            bare = copy.deepcopy(node)
            bare.keywords = [keyword for keyword in node.keywords if keyword.arg not in ("mask", "other")]
            yield node, bare


def _strides_swapped(function: ast.FunctionDef) -> Iterator[Replacement]:
    strides = [arg.arg for arg in function.args.args if arg.arg.startswith("stride_")]
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in strides:
            tensor = node.id.rsplit("_", 1)[0]
            others = [s for s in strides if s != node.id and s.rsplit("_", 1)[0] == tensor]
            if others:
                yield node, ast.Name(id=others[0], ctx=ast.Load())


_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def _is_one(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 1


def _off_by_one(function: ast.FunctionDef) -> Iterator[Replacement]:
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _SHIFTED:
            shifted = copy.deepcopy(node)
            shifted.ops = [_SHIFTED[type(node.ops[0])]()]
            yield node, shifted
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and _is_one(node.right):
            yield node, node.left


def _named(node: ast.AST, word: str) -> bool:
    return any(isinstance(part, ast.Name) and word in part.id for part in ast.walk(node))


def _scales_dropped(function: ast.FunctionDef) -> Iterator[Replacement]:
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
            is_offset = _named(node, "stride") or _named(node, "offs")
            if isinstance(node.right, ast.Name | ast.Subscript) and _named(node.right, "scale") and not is_offset:
                yield node, node.left


def _zero_points_dropped(function: ast.FunctionDef) -> Iterator[Replacement]:
    for node in ast.walk(function):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _named(node.right, "zero"):
            yield node, node.left


def _int64_removed(function: ast.FunctionDef) -> Iterator[Replacement]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="to"), args=[ast.Attribute(attr="int64")]):
                yield node, value


_SITES: dict[str, Callable[[ast.FunctionDef], Iterator[Replacement]]] = {
    "mask_removed": _masks_removed,
    "stride_swapped": _strides_swapped,
    "off_by_one": _off_by_one,
    "scale_dropped": _scales_dropped,
    "zero_point_dropped": _zero_points_dropped,
    "int64_removed": _int64_removed,
}


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


def mutants(source: str, kinds: tuple[str, ...] = KINDS) -> Iterator[Mutant]:
    """Every mutant of a variant file's jit functions, in the order of the file and of `kinds`."""
    tree = ast.parse(source)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or not _is_jit(function):
            continue
        for kind in kinds:
            for old, new in list(_SITES[kind](function)):
                # One tree serves every mutant: each swaps one node in and, after unparsing, out again.
                parent = _Replace(old, new)
                parent.visit(tree)
                mutated = ast.unparse(ast.fix_missing_locations(tree))
                _Replace(new, old).visit(tree)
                line = getattr(old, "lineno", function.lineno)
                yield Mutant(kind, function.name, line, ast.unparse(old), ast.unparse(new), mutated)
