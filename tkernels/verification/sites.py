"""Where in its author's source a kernel or a launcher stands: its own line, then each caller's."""

import ast
import functools
import inspect
import os
import sys
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch
import triton
from triton.runtime import interpreter as triton_interpreter

from tkernels import interpreter
from tkernels.variant import Variant

Site = tuple[str, ...]
"""A place in the source, as "file:line in function": its own line first, then each caller's."""

FOREIGN = tuple(f"{Path(str(file)).parent}{os.sep}" for file in (triton.__file__, interpreter.__file__, __file__))
HOST = (*FOREIGN, f"{Path(torch.__file__).parent}{os.sep}")
LAUNCH = triton_interpreter.GridExecutor.__call__.__code__
LAUNCHER = Variant.run_launcher.__code__


def kernel_site() -> Site:
    """Where the interpreted program that now runs stands, up to the kernel."""
    return _lines_below(LAUNCH, FOREIGN)


def result_is_used() -> bool:
    """Whether the kernel reads what the operation returns in which the interpreter now stands.

    A result is dropped by a call that is a statement, by a name that nobody reads, and by a function that returns it to
    a caller who drops it: Triton's compiler takes no further steps for it then.
    """
    for frame in _frames_below(LAUNCH, FOREIGN):
        dropped, returned = _results(frame.f_code)
        end = _end_of_call(frame.f_code, frame.f_lasti)
        if end in dropped:
            return False
        if end not in returned:
            return True
    return False


@functools.cache
def _end_of_call(code: CodeType, instruction: int) -> tuple[int | None, int | None]:
    """The line and column behind the call that an instruction makes."""
    _, line, _, column = list(code.co_positions())[instruction // 2]
    return line, column


_Ends = frozenset[tuple[int | None, int | None]]
"""Calls by the line and column behind them."""


@functools.cache
def _results(code: CodeType) -> tuple[_Ends, _Ends]:
    """A kernel's calls whose result is dropped, and those whose result it returns."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    ast.increment_lineno(tree, code.co_firstlineno - 1)
    nodes = list(ast.walk(tree))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    read |= {node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)}
    dropped, returned = set(), set()
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Call() as call):
                dropped.add((call.end_lineno, call.end_col_offset))
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as call) if name not in read:
                dropped.add((call.end_lineno, call.end_col_offset))
            case ast.Return(value=ast.Call() as call):
                returned.add((call.end_lineno, call.end_col_offset))
    return frozenset(dropped), frozenset(returned)


def launcher_site() -> Site:
    """Where the launcher that now runs stands, up to the launcher itself."""
    return _lines_below(LAUNCHER, HOST)


def _lines_below(outermost: CodeType, foreign: tuple[str, ...]) -> Site:
    return tuple(
        f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        for frame in _frames_below(outermost, foreign)
    )


def _frames_below(outermost: CodeType, foreign: tuple[str, ...]) -> Iterator[FrameType]:
    """The frames that now run, innermost first, up to `outermost` and without those of foreign files."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not outermost:
        if not frame.f_code.co_filename.startswith(foreign):
            yield frame
        frame = frame.f_back


def raising_site(error: BaseException) -> Site:
    """Where the launcher stood that an error came out of."""
    lines = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not code.co_filename.startswith(HOST):
            lines.append(f"{code.co_filename}:{line} in {code.co_name}")
        if code is LAUNCHER:
            lines.clear()
    return tuple(reversed(lines))


def describe_site(site: Site) -> str:
    """The place in words."""
    return ", called from ".join(site)
