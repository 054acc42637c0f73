"""Which host code a variant runs, and how a fault gets into it: its modules are imported anew, with one text replaced.

A fault may change what a variant declares, or a constant that other files have copies of. So nothing is patched: the
file, and every file of the variant's that imports it, is executed again, and the declaration that comes out of it joins
the op as the variant did. The op's contract, and with it the oracle, stays as it is.
"""

import ast
import linecache
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from tkernels.folders import BUILT_IN
from tkernels.variant import Variant
from tkernels.verification.mutation.launcher_faults import host_code
from tkernels.verification.mutation.targets import Target

_NO_FAULTS = ("wins", "configs", "key")
"""What VARIANT says for tuning alone."""


@dataclass(frozen=True)
class _Source:
    """A module's text: what each of its names is, or where it is imported from."""

    module: ModuleType

    @property
    def file(self) -> Path:
        return Path(str(self.module.__file__))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.file.read_text())

    @cached_property
    def pieces(self) -> dict[str, ast.AST]:
        """Functions, methods and assigned names; no device functions."""
        return {name: code for name, code in host_code(self.tree) if not _is_decorated(code, "jit")}

    @cached_property
    def methods(self) -> dict[str, list[str]]:
        """The pieces of each class."""
        found: dict[str, list[str]] = {}
        for name in self.pieces:
            if "." in name:
                found.setdefault(name.partition(".")[0], []).append(name)
        return found

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Name -> the module, and its name there, of what `from module import name` brings."""
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module)
        return {alias.asname or alias.name: (str(node.module), alias.name) for node in imports for alias in node.names}


def _is_decorated(code: ast.AST, word: str) -> bool:
    return isinstance(code, ast.FunctionDef) and any(word in ast.unparse(one) for one in code.decorator_list)


class _Sources:
    """The modules of one root, by name, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, _Source | None] = {}

    def of(self, name: str) -> _Source | None:
        """A module of variants or of what serves them; None of any other: a contract is no variant's."""
        if name not in self._known:
            module = sys.modules.get(name)
            file = Path(getattr(module, "__file__", None) or "/")
            is_ours = module is not None and self.root in file.parents and file.stem not in ("contract", "__init__")
            self._known[name] = _Source(module) if is_ours and module is not None else None
        return self._known[name]

    def used(self, source: _Source, code: ast.AST) -> Iterator[tuple[_Source, str]]:
        """The pieces that a piece of a module's code names."""
        for node in ast.walk(code):
            match node:
                case ast.Name(id=name):
                    yield from self._found(source, name)
                case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in source.imported:
                    module, inner = source.imported[owner]
                    other = self.of(f"{module}.{inner}")
                    if other is not None:
                        yield from self._found(other, name)

    def _found(self, source: _Source, name: str) -> Iterator[tuple[_Source, str]]:
        if name in source.pieces:
            yield source, name
        elif name in source.methods:
            yield from ((source, method) for method in source.methods[name])
        elif name in source.imported:
            module, inner = source.imported[name]
            other = self.of(module)
            if other is not None:
                yield from self._found(other, inner)

    def importing(self, source: _Source, file: Path) -> list[_Source]:
        """The modules that `source` needs and that need `file`, with both: each after those that it imports."""
        ordered: dict[str, bool] = {}

        def needs(one: _Source) -> bool:
            name = one.module.__name__
            if name not in ordered:
                modules = [(self.of(module), self.of(f"{module}.{inner}")) for module, inner in one.imported.values()]
                others = [other for pair in modules for other in pair if other is not None]
                found = [needs(other) for other in others]
                ordered[name] = any(found) or one.file == file
            return ordered[name]

        needs(source)
        ordered[source.module.__name__] = True
        chosen = (self.of(name) for name, is_needed in ordered.items() if is_needed)
        return [one for one in chosen if one is not None]


def _root(variant: Variant) -> Path:
    return BUILT_IN if BUILT_IN in variant.file.parents else variant.file.parents[1]


def launcher_targets(variants: Iterable[Variant]) -> list[Target]:
    """All host code that these variants run, their files' and what it calls in others, each in one target only."""
    users: dict[tuple[Path, str], list[Variant]] = {}
    sources: dict[Path, _Sources] = {}
    for variant in variants:
        if variant.launch is not None and variant.module is not None:
            known = sources.setdefault(_root(variant), _Sources(_root(variant)))
            for file, name in _host_code_of(variant.module, known):
                users.setdefault((file, name), []).append(variant)
    grouped: dict[tuple[Path, tuple[str, ...]], tuple[set[str], list[Variant]]] = {}
    for (file, name), mine in users.items():
        mine.sort(key=lambda variant: variant.file != file)  # stable: the file's own variant, then in their order
        labels = tuple(f"{variant.contract.name}.{variant.name}" for variant in mine)
        grouped.setdefault((file, labels), (set(), mine))[0].add(name)
    return [Target(file, frozenset(names), tuple(mine)) for (file, _), (names, mine) in grouped.items()]


def _host_code_of(module: ModuleType, sources: _Sources) -> list[tuple[Path, str]]:
    """(file, name) of the variant's declaration and of every piece of host code that it leads to."""
    own = sources.of(module.__name__)
    if own is None or "VARIANT" not in own.pieces:
        return []
    found: dict[tuple[Path, str], None] = {}
    waiting = [(own, "VARIANT")]
    while waiting:
        source, name = waiting.pop(0)
        if (source.file, name) in found:
            continue
        found[source.file, name] = None
        for part in _parts_for_faults(source.pieces[name]):
            waiting += sources.used(source, part)
    return list(found)


def _parts_for_faults(code: ast.AST) -> list[ast.AST]:
    """A piece of code, but for what a declaration says for tuning alone."""
    match code:
        case ast.Assign(value=ast.Call(func=ast.Name(id="Variant"), keywords=keywords)):
            return [keyword.value for keyword in keywords if keyword.arg not in _NO_FAULTS]
        case ast.FunctionDef(body=body):
            return list(body)
    return [code]


def replanted(variant: Variant, file: Path, source: str) -> Variant:
    """The variant as it is where one of its files has another text, for the whole process. There is no way back.

    Raises:
        Whatever importing the text raises.
        VariantError: What it declares breaks the rules.
    """
    assert variant.module is not None, "a variant with a launcher comes from a file"
    sources = _Sources(_root(variant))
    own = sources.of(variant.module.__name__)
    assert own is not None, f"{variant.file} is in its own root"
    module = variant.module
    for one in sources.importing(own, file):
        text = source if one.file == file else one.file.read_text()
        module = _executed(one.module, text)
    return module.VARIANT.joined(variant.contract, variant.name, variant.file, module, variant.entry)


def _executed(original: ModuleType, text: str) -> ModuleType:
    """A new module in the place of one, made of this text; Triton finds the text under the file's name."""
    file = str(original.__file__)
    module = ModuleType(original.__name__)
    module.__file__, module.__package__, module.__spec__ = file, original.__package__, original.__spec__
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    sys.modules[original.__name__] = module
    parent, _, name = original.__name__.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], name, module)  # `from package import module` reads it there
    exec(compile(text, file, "exec"), vars(module))
    return module
