"""How a command ends: 0 or 1 as it says; 2, with a message and no traceback, where the user can put it right."""

import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

import typer

from experiments.document import ExperimentError

Result = TypeVar("Result")


def end_with_torch(command: Callable[..., int], *arguments: object) -> None:
    """`end` of a command that needs torch."""
    import tkernels  # noqa: F401  before anything that imports Triton

    # An interpreted kernel's exp overflows to infinity, as a GPU's does, and says so through numpy.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    end(command, *arguments)


def end(command: Callable[..., int], *arguments: object) -> None:
    """Runs a command and exits with its status."""
    try:
        status = refusing(command, *arguments)
    except FileExistsError as error:
        _complain(str(error))
        raise typer.Exit(2) from None
    except BrokenPipeError:
        raise  # the reader of our output has gone: click's to handle
    except OSError as error:
        _complain(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _complain("interrupted")
        raise typer.Exit(130) from None
    except (ValueError, RuntimeError) as error:
        if not _says_it_all(error):
            raise
        _complain(str(error))
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def refusing(command: Callable[..., Result], *arguments: object) -> Result:
    """What the command returns; exits with 2, every problem on a line of its own, where an experiment is refused."""
    try:
        return command(*arguments)
    except ExperimentError as error:
        for problem in error.problems:
            _complain(problem)
        raise typer.Exit(2) from None


def _says_it_all(error: Exception) -> bool:
    """Whether an error is one that its message explains; their classes need torch, and most commands end well."""
    from tkernels import SelectionError, TuningError
    from tmodel import ConfigError, TrainingError, WeightError

    return isinstance(error, SelectionError | TuningError | ConfigError | WeightError | TrainingError)


def _complain(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
