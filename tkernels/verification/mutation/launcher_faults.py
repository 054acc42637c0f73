"""Faults put into a variant's host code, one at a time: its launcher, its declaration, and the functions it calls.

As with kernels only faults are planted: what tuning may choose freely (the configs that it tries, the axes by which it
looks them up, `wins`) is left alone. Each is an expression in the place of another.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from tkernels.verification.mutation.faults import Mutant, Replacement, called_name, is_number, parts_of, planted

HostCode = ast.FunctionDef | ast.Assign
"""A function or method; or what a module gives a name in capitals: the declaration, or a constant."""


def _plus(value: ast.expr, number: int) -> ast.expr:
    return ast.BinOp(value, ast.Add() if number > 0 else ast.Sub(), ast.Constant(abs(number)))


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name), list(arguments), [])


def _nodes(code: HostCode) -> Iterator[ast.AST]:
    """Everything in it that a fault may touch: no annotations, no docstring, no parameter's default."""
    for statement in code.body if isinstance(code, ast.FunctionDef) else [ast.Expr(code.value)]:
        yield from parts_of(statement)


# Grids


def _grids(code: HostCode) -> Iterator[ast.expr]:
    """What launches take for a grid, and what functions return for one."""
    for node in _nodes(code):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="run"), attr="launch"), args=[_, grid]):
                yield grid
            case ast.Return(value=ast.Tuple(elts=[ast.Tuple() as grid, ast.Dict()])):
                yield grid
            case ast.Return(value=ast.Tuple() as grid) if isinstance(code, ast.FunctionDef) and "grid" in code.name:
                yield grid


def _grids_changed(code: HostCode) -> Iterator[Replacement]:
    """A dim one too large, one too small, or 1; two dims swapped. Past a ceiling there is no more than time to lose:
    whoever rounds a dim up masks what lies beyond it.
    """
    for grid in _grids(code):
        dims = grid.elts if isinstance(grid, ast.Tuple) else []  # others are made by functions that have faults too
        for dim in dims:
            if not isinstance(dim, ast.Starred):
                if called_name(dim) != "cdiv":
                    yield dim, _plus(dim, 1)
                yield dim, _plus(dim, -1)
                if ast.unparse(dim) != "1":
                    yield dim, ast.Constant(1)
        for one, other in pairwise(range(len(dims))):
            swapped = list(dims)
            swapped[one], swapped[other] = dims[other], dims[one]
            yield grid, ast.Tuple(swapped)


def _ceilings_lost(code: HostCode) -> Iterator[Replacement]:
    """A division rounded down; a power of two that is half of what it must cover."""
    for node in _nodes(code):
        match node:
            case ast.Call(args=[whole, part]) if called_name(node) == "cdiv":
                yield node, ast.BinOp(whole, ast.FloorDiv(), part)
            case ast.Call(args=[_]) if called_name(node) == "next_power_of_2":
                yield node, _call("max", ast.Constant(1), ast.BinOp(node, ast.FloorDiv(), ast.Constant(2)))


# Arguments of kernels


@dataclass(frozen=True)
class _Entry:
    """An argument that a kernel is given by name."""

    name: str
    value: ast.expr


def _given(code: HostCode) -> Iterator[list[_Entry]]:
    """The arguments that one launch, or one mapping for launches, spells out."""
    for node in _nodes(code):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="run"), attr="launch"), keywords=keywords):
                yield [_Entry(keyword.arg, keyword.value) for keyword in keywords if keyword.arg is not None]
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                yield [_Entry(str(key.value), value) for key, value in pairs if isinstance(key, ast.Constant)]


def _is_stride(name: str) -> bool:
    return name.startswith("stride_")


def _pointer_calls(code: HostCode) -> Iterator[tuple[ast.Call, list[str]]]:
    """The calls of `pointers`, each with the names of its strides."""
    words: dict[str, object] = {}
    for node in _nodes(code):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                words[name] = value
    for node in _nodes(code):
        match node:
            case ast.Call(args=[layout, *_]) if called_name(node) == "pointers":
                text = layout.value if isinstance(layout, ast.Constant) else words.get(ast.unparse(layout), "")
                parts = [part.removesuffix("]").partition("[") for part in str(text).split()]
                yield node, [f"stride_{tensor}_{dim}" for tensor, _, dims in parts for dim in dims]


def _strides_changed(code: HostCode) -> Iterator[Replacement]:
    """A stride is 1, or another one: of the same tensor where it has one. Two are swapped."""
    for call, names in _pointer_calls(code):
        for name in names:
            yield call, _with_entries(call, {name: ast.Constant(1)})
        for one, other in pairwise(names):
            yield call, _with_entries(call, {one: other, other: one})
    for entries in _given(code):
        strides = [entry for entry in entries if _is_stride(entry.name)]
        for entry in strides:
            yield entry.value, ast.Constant(1)
        for stride, another in pairwise(strides):
            if ast.unparse(stride.value) != ast.unparse(another.value):
                yield stride.value, another.value


def _with_entries(mapping: ast.expr, changed: Mapping[str, ast.expr | str]) -> ast.expr:
    """The mapping with other values for some keys; a string is another key, whose value it is."""
    given = ast.Name("given")
    values = [
        ast.Subscript(given, ast.Constant(value)) if isinstance(value, str) else value for value in changed.values()
    ]
    keys: list[ast.expr | None] = [None, *map(ast.Constant, changed)]
    arguments = ast.arguments([], [ast.arg("given")], None, [], [], None, [])
    return ast.Call(ast.Lambda(arguments, ast.Dict(keys, [given, *values])), [mapping], [])


def _tensors_swapped(code: HostCode) -> Iterator[Replacement]:
    """Two neighbouring tensors take each other's place."""
    for call, _ in _pointer_calls(code):
        for place in range(1, len(call.args) - 1):
            swapped = copy.copy(call)
            swapped.args = list(call.args)
            swapped.args[place : place + 2] = swapped.args[place : place + 2][::-1]
            if not any(isinstance(argument, ast.Starred) for argument in call.args[place : place + 2]):
                yield call, swapped


def _scalars_changed(code: HostCode) -> Iterator[Replacement]:
    """A number one more or less, or another of the same kind; a block half as large; a choice the other way."""
    if _is_declaration(code):
        return
    choices = {arg.arg for arg in _arguments(code) if arg.annotation and ast.unparse(arg.annotation) == "bool"}
    for entries in _given(code):
        named = [entry for entry in entries if not _is_stride(entry.name) and not entry.name.endswith("_ptr")]
        scalars = [entry for entry in named if not _is_hint(entry.value)]
        for entry in scalars:
            is_choice = isinstance(entry.value, ast.Compare) or ast.unparse(entry.value) in choices
            if isinstance(entry.value, ast.Dict | ast.Tuple | ast.Constant):
                continue
            if is_choice:
                yield entry.value, ast.UnaryOp(ast.Not(), entry.value)
            elif entry.name.startswith("BLOCK"):
                half = ast.BinOp(entry.value, ast.FloorDiv(), ast.Constant(2))
                yield entry.value, _call("max", ast.Constant(1), half)
            else:
                yield entry.value, _plus(entry.value, 1)
                if entry.name.islower():
                    yield entry.value, _plus(entry.value, -1)
        for one, other in pairwise(scalars):
            alike = one.name.isupper() == other.name.isupper()
            if alike and ast.unparse(one.value) != ast.unparse(other.value):
                yield one.value, other.value


def _is_hint(value: ast.expr) -> bool:
    """How a loop is pipelined, which changes its speed alone."""
    return isinstance(value, ast.Attribute) and value.attr in ("num_stages", "num_warps")


def _arguments(code: HostCode) -> list[ast.arg]:
    return [*code.args.args, *code.args.kwonlyargs] if isinstance(code, ast.FunctionDef) else []


# Memory

_NARROWER = {"float32": "float16", "int32": "int8", "int64": "int32"}


def _workspaces_changed(code: HostCode) -> Iterator[Replacement]:
    """A buffer one element smaller along a dim, of a narrower dtype, not zeroed, or zeroed where it need not be."""
    for node in _nodes(code):
        match node:
            case ast.Call(args=[shape, dtype]) if called_name(node) == "Buffer":
                dims = shape.elts if isinstance(shape, ast.Tuple) else []
                for dim in dims:
                    if not isinstance(dim, ast.Starred):
                        yield dim, _call("max", ast.Constant(0), _plus(dim, -1))
                if not isinstance(shape, ast.Tuple):
                    yield shape, _one_less(shape)
                if isinstance(dtype, ast.Attribute) and dtype.attr in _NARROWER:
                    yield dtype, ast.Attribute(dtype.value, _NARROWER[dtype.attr])
                zeroed = [keyword for keyword in node.keywords if keyword.arg == "zeroed"]
                other = copy.copy(node)
                other.keywords = [] if zeroed else [ast.keyword("zeroed", ast.Constant(True))]
                yield node, other


def _one_less(shape: ast.expr) -> ast.expr:
    """A shape whose last dim is one smaller."""
    minus = ast.UnaryOp(ast.USub(), ast.Constant(1))
    last = _call("max", ast.Constant(0), _plus(ast.Subscript(shape, minus), -1))
    return ast.Tuple([ast.Starred(ast.Subscript(shape, ast.Slice(upper=minus))), last])


# Branches

_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def _compared(code: HostCode, other: Mapping[type[ast.cmpop], type[ast.cmpop]]) -> Iterator[Replacement]:
    for node in _nodes(code):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in other:
            yield node, ast.Compare(node.left, [other[type(node.ops[0])]()], node.comparators)


def _branches_negated(code: HostCode) -> Iterator[Replacement]:
    """Conditions that are no comparison, which is flipped."""
    for node in _nodes(code):
        if isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _clauses_dropped(code: HostCode) -> Iterator[Replacement]:
    """One side of an `and` or an `or`; a reason to refuse."""
    refuses = isinstance(code, ast.FunctionDef) and code.returns and ast.unparse(code.returns) == "str | None"
    for node in _nodes(code):
        match node:
            case ast.BoolOp(values=[first, *rest]):
                yield node, first
                yield node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            case ast.If(test=test, body=[ast.Return()]) if refuses:
                yield test, ast.Constant(False)
            case ast.Return(value=ast.Call() as reason) if refuses:
                yield reason, ast.Constant(None)


# Numbers


def _numbers_changed(code: HostCode) -> Iterator[Replacement]:
    """A whole number is one higher, another twice itself. Indices, shapes and a constant's own Configs are none."""
    if isinstance(code, ast.Assign) and not is_number(code.value):
        return
    fixed: set[ast.AST] = set()
    for node in _nodes(code):
        if node in fixed:
            fixed.update(ast.iter_child_nodes(node))
            continue
        match node:
            case ast.Subscript(slice=index):
                fixed.add(index)
            case ast.Call() if called_name(node) in ("stride", "size", "Config", "get"):
                fixed.update(node.args)
            case ast.Constant(value=int() | float() as value) if is_number(node):
                yield node, ast.Constant(value + 1 if isinstance(value, int) else 2 * value or 1.0)


def _extremes_swapped(code: HostCode) -> Iterator[Replacement]:
    for node in _nodes(code):
        if isinstance(node, ast.Call) and called_name(node) in ("min", "max") and len(node.args) > 1:
            yield node, _call("max" if called_name(node) == "min" else "min", *node.args)


def _factors_dropped(code: HostCode) -> Iterator[Replacement]:
    """A factor, a divisor, or what is added or subtracted."""
    for node in _nodes(code):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Add | ast.Sub):
            yield node, node.left


# Declarations

_LOST = {
    "supports": "lambda axes, device: None",
    "workspace": "lambda axes, config, device: {}",
    "prepare": "lambda weight: weight",
    "limits": "{}",
}


def _is_declaration(code: HostCode) -> bool:
    return isinstance(code, ast.Assign) and called_name(code.value) == "Variant"


def _declared(code: HostCode) -> Mapping[str, ast.expr]:
    """What a file's VARIANT declares, by name; nothing of other code."""
    if not (isinstance(code, ast.Assign) and isinstance(code.value, ast.Call) and _is_declaration(code)):
        return {}
    return {keyword.arg: keyword.value for keyword in code.value.keywords if keyword.arg is not None}


def _declarations_lost(code: HostCode) -> Iterator[Replacement]:
    """What a variant refuses, needs, makes of a weight, or limits is not said."""
    for name, value in _declared(code).items():
        if name in _LOST:
            yield value, ast.parse(_LOST[name], mode="eval").body


def _claims_made(code: HostCode) -> Iterator[Replacement]:
    """A claim that the variant does not make."""
    for name, value in _declared(code).items():
        match value:
            case ast.Constant(value=False) if name in ("deterministic", "batch_invariant"):
                yield value, ast.Constant(True)


def _limits_widened(code: HostCode) -> Iterator[Replacement]:
    """The least value of a config's constant is half of what it was."""
    match _declared(code).get("limits"):
        case ast.Dict(values=values):
            for value in values:
                match value:
                    case ast.Tuple(elts=[ast.Constant(value=int() as low) as least, _]) if low > 1:
                        yield least, ast.Constant(low // 2)


def _defaults_illegal(code: HostCode) -> Iterator[Replacement]:
    """A default config's value thrice itself where only powers of two are legal, and none elsewhere."""
    match _declared(code).get("default"):
        case ast.Dict(values=values):
            for config in values:
                match config:
                    case ast.Call(keywords=[ast.keyword(arg=str(name), value=value), *_]):
                        thrice = ast.BinOp(value, ast.Mult(), ast.Constant(3))
                        yield value, thrice if name.startswith("BLOCK") else ast.Constant(0)


_SITES: dict[str, Callable[[HostCode], Iterator[Replacement]]] = {
    "grid_changed": _grids_changed,
    "ceiling_lost": _ceilings_lost,
    "stride_changed": _strides_changed,
    "tensors_swapped": _tensors_swapped,
    "scalar_changed": _scalars_changed,
    "workspace_changed": _workspaces_changed,
    "bound_shifted": partial(_compared, other=_SHIFTED),
    "condition_flipped": partial(_compared, other=_FLIPPED),
    "branch_negated": _branches_negated,
    "clause_dropped": _clauses_dropped,
    "number_changed": _numbers_changed,
    "extreme_swapped": _extremes_swapped,
    "factor_dropped": _factors_dropped,
    "declaration_lost": _declarations_lost,
    "claim_made": _claims_made,
    "limit_widened": _limits_widened,
    "default_illegal": _defaults_illegal,
}
LAUNCHER_KINDS = tuple(_SITES)


def launcher_mutants(file: Path, names: frozenset[str], kinds: tuple[str, ...] = LAUNCHER_KINDS) -> Iterator[Mutant]:
    """Every mutant of the host code of these names: functions, "Class.method", and what a module gives a name."""
    text = file.read_bytes()
    sites = {kind: _SITES[kind] for kind in kinds}
    for name, code in host_code(ast.parse(text)):
        if name in names:
            yield from planted("launcher", file, text, name, code, sites)


def host_code(module: ast.Module) -> Iterator[tuple[str, HostCode]]:
    """The pieces of a module that faults can be put into, by name; device functions, too, which nobody names."""
    for statement in module.body:
        match statement:
            case ast.FunctionDef():
                yield statement.name, statement
            case ast.ClassDef(body=body):
                for method in body:
                    if isinstance(method, ast.FunctionDef):
                        yield f"{statement.name}.{method.name}", method
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield name, statement
