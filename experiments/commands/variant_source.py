"""The source of a new variant's file: one of its op's own under another name, with marks where the work begins.

Device code that the op's variants share in a module of theirs comes along: all of the kernel is there to be changed.
"""

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tkernels.source_hash import called_functions, is_jit
from tkernels.variant import Variant

_LINE = 120

_DEVICE = "# The work begins here: what runs on the device."
_HOST = "# What runs on the host: the grid and the kernel's arguments follow from shapes, strides and dtypes alone."
_DECLARED = "# What is declared: when it wins, what it does not support, the configs that tuning tries, and its claims."


class _Origin(NamedTuple):
    """Where a name is imported from: `name` of a module, or the module itself where that is None."""

    module: str
    name: str | None = None


class _Chunk(NamedTuple):
    """A statement of a file's top level, and its lines with the comments and blank lines before it."""

    node: ast.stmt
    text: str


def count_device_lines(variant: Variant) -> int:
    """The lines of all jit functions that a variant's kernels are made of."""
    return sum(len(inspect.getsourcelines(one.fn)[0]) for one in called_functions(variant.kernels))


def write_source(start: Variant, name: str, opening: str) -> str:
    """The text of a file whose variant `name` does what `start` does; `opening` is its docstring."""
    source = start.file.read_text(encoding="utf-8")
    tree = ast.parse(source)
    shared = [one for one in called_functions(start.kernels) if _is_private(one.fn.__module__)]
    shared.sort(key=lambda one: (one.fn.__module__, inspect.getsourcelines(one.fn)[1]))
    chunks = _mark(start, _chunks(source, tree))
    first = next(index for index, chunk in enumerate(chunks) if getattr(chunk.node, "name", "") in start.kernels)
    texts = [chunk.text for chunk in chunks]
    copied = [f"\n\n{inspect.getsource(one.fn).rstrip()}" for one in shared]
    texts[first:first] = [f"\n\n{_DEVICE}", *copied]
    body = "\n".join(texts).strip("\n")
    body = re.sub(rf"\b{start.contract.name}_{start.name}(?=_|\b)", f"{start.contract.name}_{name}", body)
    origins = _imports_of(tree)
    for one in shared:
        origins |= _names_from_outside(one)
    own = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    needed = own.difference(one.fn.__name__ for one in shared)
    imports = _format_imports({bound: origin for bound, origin in origins.items() if bound in needed})
    return f'"""{opening}"""\n\n{imports}\n\n{body}\n'


def _is_private(module: str) -> bool:
    """Whether a module serves the variants beside it, as its name says."""
    return module.rpartition(".")[2].startswith("_")


def _chunks(source: str, tree: ast.Module) -> list[_Chunk]:
    """The file's statements, without its docstring and imports."""
    lines, begin, found = source.splitlines(), 0, []
    for node in tree.body:
        assert node.end_lineno is not None
        if not isinstance(node, ast.Import | ast.ImportFrom) and node is not tree.body[0]:
            found.append(_Chunk(node, "\n".join(lines[begin : node.end_lineno])))
        begin = node.end_lineno
    return found


def _mark(start: Variant, chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """The chunks, with a comment over the launcher and one over the declaration."""
    marked = []
    for chunk in chunks:
        assigned = [target.id for target in getattr(chunk.node, "targets", ()) if isinstance(target, ast.Name)]
        is_launcher = getattr(chunk.node, "name", "") == getattr(start.launch, "__name__", "")
        mark = _HOST if is_launcher else _DECLARED if "VARIANT" in assigned else ""
        marked.append(_Chunk(chunk.node, f"\n\n{mark}\n{chunk.text.lstrip()}") if mark else chunk)
    return marked


def _imports_of(tree: ast.Module) -> dict[str, _Origin]:
    """What a module's imports bind."""
    bound = {}
    for node in tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            origin = _Origin(str(node.module), alias.name) if isinstance(node, ast.ImportFrom) else _Origin(alias.name)
            bound[alias.asname or alias.name] = origin
    return bound


def _names_from_outside(function: Any) -> dict[str, _Origin]:
    """Where each of the names is from that a jit function of another file uses; what it defines itself is its own."""
    file = Path(inspect.getsourcefile(function.fn) or "")
    imported = _imports_of(ast.parse(file.read_text(encoding="utf-8")))
    used = {node.id for node in ast.walk(ast.parse(inspect.getsource(function.fn))) if isinstance(node, ast.Name)}
    return {
        name: imported.get(name, _Origin(function.fn.__module__, name))
        for name in used.intersection(function.fn.__globals__)
    }


def _format_imports(origins: Mapping[str, _Origin]) -> str:
    """The imports that bind these names: of the standard library, of others, of tkernels."""
    groups: dict[int, list[str]] = defaultdict(list)
    for line, module in _import_lines(origins):
        root = module.partition(".")[0]
        groups[0 if root in sys.stdlib_module_names else 2 if root == "tkernels" else 1].append(line)
    return "\n\n".join("\n".join(groups[place]) for place in sorted(groups))


def _import_lines(origins: Mapping[str, _Origin]) -> Iterator[tuple[str, str]]:
    """Each import with its module, in order."""
    named: dict[str, list[str]] = defaultdict(list)
    for bound, (module, name) in sorted(origins.items(), key=lambda item: (item[1].module, item[1].name or "")):
        if name is None:
            yield (f"import {module}" if bound == module else f"import {module} as {bound}"), module
        else:
            named[module].append(name if bound == name else f"{name} as {bound}")
    for module, names in named.items():
        line = f"from {module} import {', '.join(names)}"
        if len(line) > _LINE:
            line = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
        yield line, module


def is_start(variant: Variant) -> bool:
    """Whether a file launches kernels that it defines, from which another can start."""
    return variant.launch is not None and any(is_jit(one) for one in variant.kernels.values())
