"""The architectures that can be served, one file each: a module here with an `ARCHITECTURE` is all it takes.

Those of outside folders join for one model or experiment: `architectures_from` in a YAML and of LLM,
`--architectures-from` on the command line.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from tkernels.names import suggest_name
from tkernels.registry import import_outside
from tmodel.config import Architecture
from tmodel.json_files import ConfigError

Architectures = Mapping[str, Architecture]
"""By name; read-only."""


class ArchitectureError(ValueError):
    """An architecture's file is broken, or declares one that is there already; the message names the file."""


@cache
def known_architectures() -> Architectures:
    """Every architecture of this folder, by name."""
    found: dict[str, Architecture] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        _join(found, module, Path(str(module.__file__)))
    return MappingProxyType(found)


def architectures_with(folders: Sequence[Path | str]) -> Architectures:
    """Those of this folder and of outside ones, every file of which declares an `ARCHITECTURE`.

    Files and folders whose name begins with an underscore or a dot are left alone.

    Raises:
        ArchitectureError: no such folder, a file that cannot be imported or declares no Architecture, or one whose name
            is taken.
    """
    found = dict(known_architectures())
    for folder in (Path(folder).resolve() for folder in folders):
        if not folder.is_dir():
            raise ArchitectureError(f"architectures_from: {folder} is not a folder")
        files = [file for file in sorted(folder.glob("*.py")) if not file.name.startswith(("_", "."))]
        if not files:
            raise ArchitectureError(f"architectures_from: {folder} holds no architecture, a file <name>.py")
        for file in files:
            _join(found, import_outside(file, ArchitectureError), file)
    return MappingProxyType(found)


def _join(found: dict[str, Architecture], module: ModuleType, file: Path) -> None:
    """Adds what `module` declares, unless it is there: a file that is named twice is one."""
    declared = getattr(module, "ARCHITECTURE", None)
    if not isinstance(declared, Architecture):
        raise ArchitectureError(f"{file}: must define ARCHITECTURE, a tmodel.Architecture")
    if declared.name in found:
        raise ArchitectureError(f"{file}: declares {declared.name}, which another file declares too")
    found[declared.name] = declared


def find_architecture(name: object, architectures: Architectures) -> Architecture:
    """The architecture `name`; ConfigError lists those that there are, with the nearest."""
    if isinstance(name, str) and name in architectures:
        return architectures[name]
    hint = suggest_name(name, architectures)
    raise ConfigError(f"unknown architecture {name!r}; known are: {', '.join(sorted(architectures))}{hint}")
