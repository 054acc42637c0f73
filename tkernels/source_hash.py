"""A content hash of a kernel: its code and that of every jit helper it calls, comments and docstrings aside."""

import ast
import inspect
import textwrap
from hashlib import sha256
from typing import Any


def is_jit(value: Any) -> bool:
    """Whether this is a `@triton.jit` function, of a process that compiles or of one that interprets."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    return isinstance(value, JITFunction | InterpretedFunction)


def _find_references(tree: ast.AST, scope: dict[str, Any]) -> list[tuple[str, Any]]:
    """The names in `tree` that resolve to something in the function's globals, `module.name` included."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            found[node.id] = scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            if inspect.ismodule(owner) and hasattr(owner, node.attr):
                found[f"{node.value.id}.{node.attr}"] = getattr(owner, node.attr)
    return sorted(found.items())


def called_functions(kernels: dict[str, Any]) -> list[Any]:
    """The jit functions given, and all that they call, Triton's own aside; each once, callers first."""
    found: dict[int, Any] = {}
    waiting = list(kernels.values())
    while waiting:
        function = waiting.pop(0)
        if id(function) in found or function.fn.__module__.startswith("triton."):
            continue
        found[id(function)] = function
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
        waiting += [value for _, value in _find_references(tree, function.fn.__globals__) if is_jit(value)]
    return list(found.values())


def _collect_code(function: Any, seen: dict[int, str]) -> None:
    """Adds the code of a function and of what it calls; keyed by identity, since a file's location must not count."""
    from triton.language import constexpr

    python = function.fn
    if id(python) in seen:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(python)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    # What a decorator is given decides what is compiled; a plain one says nothing.
    definition.decorator_list = [one for one in definition.decorator_list if isinstance(one, ast.Call)]
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    values = []
    seen[id(python)] = ""
    for name, value in _find_references(tree, python.__globals__):
        if is_jit(value):
            if not value.fn.__module__.startswith("triton."):
                _collect_code(value, seen)
        elif isinstance(value, constexpr) and name != "INTERPRETING":  # the mode is not part of what a GPU runs
            values.append(f"{name}={value.value!r}")
    seen[id(python)] = "\n".join([ast.dump(tree), *values])


def source_hash(kernels: dict[str, Any]) -> str:
    """16 hex digits that change when any of the kernels' code, or code they call, does."""
    seen: dict[int, str] = {}
    for kernel in kernels.values():
        _collect_code(kernel, seen)
    return sha256("\n".join(sorted(seen.values())).encode()).hexdigest()[:16]
