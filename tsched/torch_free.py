"""Modules of tkernels that need no torch, for those who must not wait for it.

To import such a module by its name imports the package, and so torch; until that is there it is loaded from its file.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def folder_of(package: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}")
    return Path(spec.origin).parent


def load_from_file(name: str) -> ModuleType:
    """The module tkernels.`name`. An import of it later finds the same one, with the same classes."""
    if name != "errors":
        load_from_file("errors")  # it is where any module's errors come from
    full_name = f"tkernels.{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, folder_of("tkernels") / f"{name}.py")
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"no module {full_name}")
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]


if TYPE_CHECKING:
    from tkernels.errors import TKernelsError as TKernelsError
else:
    TKernelsError = load_from_file("errors").TKernelsError


def suggest_name(name: object, known: "Iterable[str]") -> str:
    """The end of an error for an unknown name, see tkernels.names.suggest_name."""
    suggestion: str = load_from_file("names").suggest_name(name, known)
    return suggestion
