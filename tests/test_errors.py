"""One root of all errors that the four packages define."""

import ast
import builtins

import tkernels
import tmodel
import tsched
from tests.test_floors import FLOORS, modules
from tkernels import TKernelsError

SIGNALS = {"RunInterrupted", "_EnoughError", "_Reached", "_StopForward"}  # what they end was meant to end


def defined_errors() -> dict[str, set[str]]:
    """Class -> all its bases by name, of the exceptions that the packages' files define; warnings are left out."""
    bases = {
        node.name: {ast.unparse(base).split(".")[-1] for base in node.bases}
        for floor in FLOORS
        for file in modules(floor).values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }

    def ancestors(name: str) -> set[str]:
        own = bases.get(name, set())
        return own.union(*(ancestors(base) for base in own - {name}))

    errors = {name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, BaseException)}
    return {
        name: found
        for name in bases
        if (found := ancestors(name)) & errors and not any(base.endswith("Warning") for base in found)
    }


def test_every_error_of_the_packages_has_one_root() -> None:
    found = defined_errors()
    assert {"ConfigError", "WeightError", "OptionError", "RefusedError", "EngineError", "ExperimentError"} < set(found)
    outside = {name for name, bases in found.items() if name != "TKernelsError" and "TKernelsError" not in bases}
    assert outside == SIGNALS


def test_an_error_is_a_builtin_one_too() -> None:
    for error in (tmodel.ConfigError, tmodel.WeightError, tkernels.SelectionError, tkernels.UnknownNameError):
        assert issubclass(error, TKernelsError)
        assert issubclass(error, ValueError)
    assert issubclass(tsched.EngineError, RuntimeError)


def test_errors_loaded_without_torch_have_the_same_root() -> None:
    from tsched.options import OptionError
    from tsched.requests.errors import RefusedError

    assert TKernelsError in OptionError.__mro__
    assert TKernelsError in RefusedError.__mro__
