"""Processes that a test starts, whoever of them starts others, are found again by a mark in their environment."""

import os
import time
from pathlib import Path

MARK = "TKERNELS_TEST_RUN"
"""In the environment of what a test starts, and of whatever that starts."""


def marked(mark: str) -> dict[str, str]:
    """An environment by which processes are found again."""
    return {**os.environ, MARK: mark}


def left_over(mark: str, seconds: float) -> list[str]:
    """The command lines of processes with this mark that are still there, some seconds having been waited for."""
    deadline = time.monotonic() + seconds
    while (found := _with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _with(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has just ended
    return found
