"""Modules of tkernels that need no torch, for those who must not wait for it.

To import such a module by its name imports the package, and so torch; until that is there it is loaded from its file.
"""

import importlib.util
import sys
from functools import cache
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


@cache
def load_from_file(name: str) -> ModuleType:
    """The module tkernels.`name`."""
    if f"tkernels.{name}" in sys.modules:
        return sys.modules[f"tkernels.{name}"]
    spec = importlib.util.spec_from_file_location(f"tkernels_{name}", folder_of("tkernels") / f"{name}.py")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module tkernels.{name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def suggest_name(name: object, known: "Iterable[str]") -> str:
    """The end of an error for an unknown name, see tkernels.names.suggest_name."""
    suggestion: str = load_from_file("names").suggest_name(name, known)
    return suggestion
