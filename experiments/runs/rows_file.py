"""results.jsonl as it is written: by one process, all rows of a task in one write."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from experiments.document import ExperimentError
from experiments.runs.rows import Row
from tkernels.files import naming, replacing
from tkernels.isolation import write_whole

LOCK = ".lock"


class RowsFile:
    """Open for appending, and its folder locked: who has it is the only one that writes there."""

    def __init__(self, path: Path) -> None:
        """Makes the file where there is none; ExperimentError where another process has the folder."""
        self._path = path
        self._lock = FileLock(path.with_name(LOCK), blocking=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ExperimentError([f"{path.parent}: another process is running it"]) from None
        self._file = self._open()

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def append(self, rows: Iterable[Row]) -> None:
        """Adds the rows, which are on disk when this returns."""
        with naming(self._path):
            write_whole(self._file, _lines(rows))
            os.fsync(self._file)

    def rewrite(self, rows: Sequence[Row]) -> None:
        """Leaves exactly these rows, each on a line that ends."""
        with replacing(self._path) as partial:
            partial.write_bytes(_lines(rows))
        os.close(self._file)
        self._file = self._open()

    def close(self) -> None:
        os.close(self._file)
        Path(self._lock.lock_file).unlink(missing_ok=True)  # while it is ours: nobody else holds what we take away
        self._lock.release()


def _lines(rows: Iterable[Row]) -> bytes:
    return "".join(row.as_json() + "\n" for row in rows).encode()
