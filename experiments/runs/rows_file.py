"""results.jsonl as it is written: by one process, all rows of a task in one write."""

import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from experiments.document import ExperimentError
from experiments.runs.rows import Row
from tkernels.isolation import write_whole


class RowsFile:
    """Open for appending, and locked: who has it is the only one that writes into the folder."""

    def __init__(self, path: Path) -> None:
        """Makes the file where there is none; ExperimentError where another process has it."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between the two, another process may have put a new file in its place: see `rewrite`.
            is_there = os.path.samestat(os.fstat(self._file), path.stat())
        except OSError:
            is_there = False
        if not is_there:
            os.close(self._file)
            raise ExperimentError([f"{path.parent}: another process is running it"])

    def append(self, rows: Iterable[Row]) -> None:
        """On disk when this returns."""
        with naming(self._path):
            write_whole(self._file, _lines(rows))
            os.fsync(self._file)

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Leaves exactly these rows, each on a line that ends. Whenever the process is killed, there is the file before
        or the new one; the new one is locked before it is there.
        """
        partial = self._path.with_name(self._path.name + ".partial")
        with naming(partial):
            file = os.open(partial, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_whole(file, _lines(rows))
                os.fsync(file)
                os.replace(partial, self._path)
            except BaseException:
                os.close(file)
                raise
        os.close(self._file)
        self._file = file

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write says which file it was about: the system's own do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _lines(rows: Iterable[Row]) -> bytes:
    return "".join(row.as_json() + "\n" for row in rows).encode()
