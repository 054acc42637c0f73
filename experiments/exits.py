"""How a command ends: 0 or 1 as it says; 2, with a message and no traceback, where the user can put it right."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NoReturn

import typer

from experiments.document import ExperimentError
from tsched.torch_free import suggest_name

INTERRUPTED = 130
"""The status of a command that a signal cut off: a shell's for Ctrl-C."""


def import_torch() -> None:
    """Imports torch, and tkernels before anything that imports Triton."""
    import tkernels  # noqa: F401

    # An interpreted kernel's exp overflows to infinity, as a GPU's does, and says so through numpy.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")


def end(command: Callable[..., int], *arguments: object) -> NoReturn:
    """Runs a command and exits with its status; what the user can put right is said without a traceback."""
    try:
        status = command(*arguments)
    except ExperimentError as error:
        raise _refused(*error.problems) from None
    except FileExistsError as error:
        raise _refused(str(error)) from None
    except BrokenPipeError:
        raise  # the reader of our output has gone: click's to handle
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


def _refused(*problems: str, status: int = 2) -> typer.Exit:
    """Says every problem on a line of its own."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return typer.Exit(status)


def _interrupt() -> None:
    raise KeyboardInterrupt


class Signals(AbstractContextManager["Signals"]):
    """Has SIGTERM and SIGHUP do what Ctrl-C does, where they are not ignored (as under nohup).

    came: Whether any has come.
    """

    def __init__(self, act: Callable[[], None] = _interrupt) -> None:
        """act: What each does."""
        self.came = self._are_held = False
        self._act = act
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hold(self) -> None:
        """From now on the first that comes is noted alone: what has been found is said whole."""
        self._are_held = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_first, self.came = not self.came, True
        if not (self._are_held and is_first):
            self._act()


def ended_by_signals(why: str) -> Signals:
    """Signals end the process at once, with status 130 and `why`: of an import, which may hide what is raised in it."""

    def leave() -> None:
        os.write(2, f"exit status {INTERRUPTED}: {why}\n".encode())
        os._exit(INTERRUPTED)

    return Signals(leave)
