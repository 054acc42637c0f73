"""What SIGINT, SIGTERM and SIGHUP do to a command. It imports little: signals come while the command line is loaded."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

INTERRUPTED = 130
"""The status of a command that a signal cut off: a shell's for Ctrl-C."""


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
