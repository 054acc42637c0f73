"""How a command ends: 0 or 1 as it says; 2, with a message and no traceback, where the user can put it right."""

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import NoReturn

import typer

from experiments.document import ExperimentError
from experiments.signals import INTERRUPTED
from tsched.torch_free import suggest_name

OUTPUT_CLOSED = 141
"""Of one whose output nobody reads any more, as in `tk ops | head -1`: a shell's for what SIGPIPE ends."""


def import_torch() -> None:
    """Imports torch, and tkernels before anything that imports Triton."""
    import tkernels  # noqa: F401

    # An interpreted kernel's exp overflows to infinity, as a GPU's does, and says so through numpy.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")


def end(command: Callable[..., int], *arguments: object) -> NoReturn:
    """Runs a command and exits with its status; what the user can put right is said without a traceback."""
    try:
        status = command(*arguments)
        sys.stdout.flush()
    except ExperimentError as error:
        raise _refused(*error.problems) from None
    except FileExistsError as error:
        raise _refused(str(error)) from None
    except BrokenPipeError:
        raise _output_closed() from None
    except SystemExit as left:  # rich's own, which has the status of findings
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        raise _output_closed() from None
    except OSError as error:
        raise _refused(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)) from None
    except KeyboardInterrupt:
        raise _refused("interrupted", status=INTERRUPTED) from None
    except (ValueError, RuntimeError) as error:
        if not _is_meant_for_users(error):
            raise
        raise _refused(str(error)) from None
    raise typer.Exit(status)


def check_name(option: str, name: str, known: Iterable[str]) -> None:
    """Raises ExperimentError for a name that an option does not know, with those that there are and the nearest."""
    known = list(known)
    if name not in known:
        raise ExperimentError([f"{option} {name}: there is {', '.join(known)}{suggest_name(name, known)}"])


def parse_names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The names, each once, that `text` separates by commas; ExperimentError for one that is not known."""
    known, names = list(known), list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        check_name(option, name, known)
    return names


def _is_meant_for_users(error: Exception) -> bool:
    """Whether an error's message explains it; the classes need torch, and most commands end well."""
    from tkernels import SelectionError, TuningError
    from tmodel import ConfigError, TrainingError, WeightError

    return isinstance(error, SelectionError | TuningError | ConfigError | WeightError | TrainingError)


def _output_closed() -> typer.Exit:
    """Nothing more is written, also not when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return typer.Exit(OUTPUT_CLOSED)


def _refused(*problems: str, status: int = 2) -> typer.Exit:
    """Says every problem on a line of its own."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(status)
