"""A server's log: each record is a line of JSON, and none has a word of a prompt or an output.

A thread writes the lines, so that whoever does not read them, as a full pipe or a held terminal, holds up no request.
It uses no handler and no file of Python's: the process could not end while one of these waits.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue

from tsched.serving.gate import ACCESS

MOST_WAITING = 10_000
"""Lines that wait to be written; what comes when there are so many is lost."""

_LAST_LINES_S = 1.0


class JsonLines(logging.Formatter):
    """Writes a record as a line of JSON; those of the access log are such lines already."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == ACCESS.name:
            return record.getMessage()
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _QueueLines(logging.Handler):
    """Puts the lines of records into a queue."""

    def __init__(self, lines: Queue[str | None]) -> None:
        super().__init__()
        self._lines = lines
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            self._lines.put_nowait(self.format(record))


@contextmanager
def log_lines(descriptor: int) -> Iterator[None]:
    """Has the process log to a file descriptor, but for uvicorn's chatter, until the block ends."""
    lines: Queue[str | None] = Queue(MOST_WAITING)
    handler, root, uvicorn = _QueueLines(lines), logging.getLogger(), logging.getLogger("uvicorn")
    levels = root.level, uvicorn.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    uvicorn.setLevel(logging.WARNING)
    threading.Thread(target=_write_lines, args=(lines, descriptor), name="log", daemon=True).start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(levels[0])
        uvicorn.setLevel(levels[1])
        deadline = time.monotonic() + _LAST_LINES_S
        while lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(Full):
            lines.put_nowait(None)


def _write_lines(lines: Queue[str | None], descriptor: int) -> None:
    """Writes lines until None comes; what does not fit on a full disk is lost."""
    while (line := lines.get()) is not None:
        left = f"{line}\n".encode()
        with suppress(OSError):
            while left:
                left = left[os.write(descriptor, left) :]
        lines.task_done()
