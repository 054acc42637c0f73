"""The architectures that can be served, one file each: a module here with an `ARCHITECTURE` is all it takes.

Those of outside folders join for one model or experiment: `architectures_from` in a YAML and of LLM,
`--architectures-from` on the command line.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from types import MappingProxyType, ModuleType

from tkernels.errors import TKernelsError
from tkernels.names import suggest_name
from tkernels.registry import import_outside
from tmodel.config import Architecture
from tmodel.json_files import ConfigError

Architectures = Mapping[str, Architecture]
"""By name; read-only."""


class ArchitectureError(TKernelsError, ValueError):
    """An architecture's file is broken, or declares one that is there already; the message names the file."""


@cache
def known_architectures() -> Architectures:
    """Every architecture of this folder, by name."""
    return _by_name(_house_modules())


def architectures_with(folders: Sequence[PurePath | str]) -> Architectures:
    """Those of this folder and of outside ones, every file of which declares an `ARCHITECTURE`.

    Files whose name begins with an underscore or a dot are left alone.

    Raises:
        ArchitectureError: No such folder, a file that cannot be imported or declares no Architecture, or one whose name
            is taken.
    """
    if not folders:
        return known_architectures()
    modules = dict(_house_modules())
    for folder in (Path(folder).resolve() for folder in folders):
        if not folder.is_dir():
            raise ArchitectureError(f"architectures_from: {folder} is not a folder")
        files = [file for file in sorted(folder.glob("*.py")) if not file.name.startswith(("_", "."))]
        if not files:
            raise ArchitectureError(f"architectures_from: {folder} holds no architecture, a file <name>.py")
        modules |= {file: import_outside(file, ArchitectureError) for file in files}
    return _by_name(modules)


def _house_modules() -> dict[Path, ModuleType]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {Path(str(module.__file__)): module for module in modules}


def _by_name(modules: Mapping[Path, ModuleType]) -> Architectures:
    """What the files declare."""
    files: dict[str, Path] = {}
    found: dict[str, Architecture] = {}
    for file, module in modules.items():
        declared = getattr(module, "ARCHITECTURE", None)
        if not isinstance(declared, Architecture):
            raise ArchitectureError(f"{file}: must define ARCHITECTURE, a tmodel.Architecture")
        if declared.name in files:
            raise ArchitectureError(f"{file}: declares {declared.name}, which {files[declared.name]} declares too")
        files[declared.name], found[declared.name] = file, declared
    return MappingProxyType(found)


def find_architecture(name: object, architectures: Architectures) -> Architecture:
    """The architecture `name`; ConfigError lists those that there are, with the nearest."""
    if isinstance(name, str) and name in architectures:
        return architectures[name]
    hint = suggest_name(name, architectures)
    raise ConfigError(f"unknown architecture {name!r}; known are: {', '.join(sorted(architectures))}{hint}")
