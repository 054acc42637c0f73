"""What a Python file imports that neither git's state (this project) nor a version (an installed package) tells of."""

import ast
import site
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from pathlib import Path

import tkernels


def imported_files(file: Path) -> dict[str, Path]:
    """Module -> its file, of all that `file` imports, in its functions too, and that those do, where they are neither
    installed nor of this project. Nothing is imported for it.
    """
    places = _own_places()
    found: dict[str, Path] = {}
    waiting = [(file, "")]
    while waiting:
        importer, package = waiting.pop()
        for name in imported_names(importer, package):
            for spec in _specs(name, places):
                if spec.name not in found and spec.origin is not None and spec.origin.endswith(".py"):
                    found[spec.name] = Path(spec.origin)
                    is_package = spec.submodule_search_locations is not None
                    waiting.append((found[spec.name], spec.name if is_package else spec.name.rpartition(".")[0]))
    return found


def imported_names(file: Path, package: str = "") -> set[str]:
    """The modules that a file names in its import statements; `package`: what relative ones start from. What is taken
    from a module may be one itself, and is among them.
    """
    names: set[str] = set()
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # imported by nobody yet, and a failure of whoever does
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level <= package.count(".") + bool(package):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def _own_places() -> list[str]:
    """Of `sys.path`, where modules are that somebody keeps and edits."""
    project = Path(tkernels.__file__).resolve().parents[1]
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, site.getusersitepackages())]
    places = {entry: Path(entry).resolve() for entry in sys.path}
    return [
        str(place)
        for place in dict.fromkeys(places.values())
        if place != project and not any(place.is_relative_to(one) for one in installed)
    ]


def _specs(name: str, places: list[str]) -> Iterator[ModuleSpec]:
    """Of a module and the packages that it is in, outermost first, those that are found."""
    inside: list[str] | None = places
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        try:
            spec = PathFinder.find_spec(".".join(parts[:count]), inside)
        except KeyError:  # a folder without __init__.py in another, which Python finds only once that is imported
            return
        if spec is None:
            return
        yield spec
        if spec.submodule_search_locations is None:
            return
        inside = list(spec.submodule_search_locations)
