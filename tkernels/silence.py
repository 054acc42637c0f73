"""What foreign code prints beside its work, dropped."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silenced() -> Iterator[None]:
    """Drops what is written meanwhile to this process's stdout and stderr, also below Python and by what it starts."""
    _flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with open(os.devnull, "w") as nowhere:
            for number in kept:
                os.dup2(nowhere.fileno(), number)
        yield
    finally:
        _flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
