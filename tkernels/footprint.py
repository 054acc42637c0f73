"""What an outside file changes of the process that all variants share, where it is only tried.

Each is imported into one process with the others and with the checks: one that replaces a function of torch would be
judged by its own torch, and the others too. What it adds is its own affair, and what torch itself replaces, torch's.
"""

import os
import signal
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_SHARED = ("torch", "triton", "tkernels", "numpy", "builtins", "math")
"""The packages that all stand on."""


def code_shared() -> dict[str, Any]:
    """By its name, every public module, function, class and method of these packages as it is now."""
    modules = {name: one for name, one in sys.modules.items() if name.partition(".")[0] in _SHARED and "._" not in name}
    return {**modules, **{name: one for module in modules.values() for name, one in _code_of(module)}}


def settings_shared() -> dict[str, Any]:
    """By its name, what a file could set for all."""
    where = os.stat(".")
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM)
    return {
        **{f"what {one.name} does": signal.getsignal(one) for one in handled},
        "the working directory": (where.st_dev, where.st_ino),
        "TRITON_INTERPRET": os.environ.get("TRITON_INTERPRET"),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "sys.stdout": sys.stdout,
        "sys.stderr": sys.stderr,
    }


def find_changes(code: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The names of what is no longer as it was."""
    code_now, settings_now = code_shared(), settings_shared()
    changed = [name for name, was in code.items() if not _is_kept(was, code_now.get(name))]
    new = code_now.keys() - code.keys()
    hidden = [name for name in new if name.rpartition(".")[0] in code and _hides_inherited(name, code_now)]
    return [*(name for name, was in settings.items() if settings_now[name] != was), *changed, *sorted(hidden)]


def _code_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if not callable(value):
            continue
        yield f"{module.__name__}.{name}", value
        if issubclass(type(value), type) and value.__module__ == module.__name__:
            for member, one in list(vars(value).items()):
                if callable(one) or issubclass(type(one), property | classmethod | staticmethod):
                    yield f"{module.__name__}.{name}.{member}", one


def _hides_inherited(name: str, code: Mapping[str, Any]) -> bool:
    """Whether it is a method that stands before a base's of the same name."""
    owner, _, member = name.rpartition(".")
    bases = getattr(code.get(owner), "__mro__", ())[1:-1]  # without itself, and object
    return any(member in vars(base) for base in bases) and not _is_kept(None, code[name])


def _is_kept(was: Any, value: Any) -> bool:
    """Whether it is the same, or a function of these packages in its place: torch's compiler wraps torch's own."""
    if value is was:
        return True
    written = getattr(value, "__code__", None)
    return written is not None and any(Path(written.co_filename).is_relative_to(folder) for folder in _folders())


def _folders() -> list[Path]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _SHARED]
    return [Path(file).parent for file in files if file is not None and Path(file).name == "__init__.py"]
