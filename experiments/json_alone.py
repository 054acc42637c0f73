"""With --json a command's value is alone on stdout, whatever else prints: an outside file may, and any library."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _ToStderr(io.TextIOBase):
    """Stands where stdout was: what is printed goes to stderr. own: where the value goes."""

    def __init__(self, own: TextIO) -> None:
        self.own = own

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


@contextmanager
def json_alone() -> Iterator[None]:
    """Meanwhile what is printed, also below Python, goes to stderr, and to stdout what `write_value` is given."""
    sys.stdout.flush()
    if sys.stdout is not sys.__stdout__:  # a test's
        with _standing_in(sys.stdout):
            yield
        return
    form: Any = sys.stdout
    with os.fdopen(os.dup(1), "w", encoding=form.encoding, errors=form.errors) as own, _standing_in(own):
        os.dup2(2, 1)
        try:
            yield
        finally:
            own.flush()
            os.dup2(own.fileno(), 1)


@contextmanager
def _standing_in(own: TextIO) -> Iterator[None]:
    before, sys.stdout = sys.stdout, _ToStderr(own)
    try:
        yield
    finally:
        sys.stdout = before


def write_value(text: str) -> None:
    """Writes a line to what stdout is."""
    print(text, file=sys.stdout.own if isinstance(sys.stdout, _ToStderr) else sys.stdout, flush=True)
