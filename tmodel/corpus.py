"""Text that every machine has: the sources of Python's own standard library, in a fixed order, split by file."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tkernels.errors import TKernelsError

# Tests repeat themselves, `encodings` and `pydoc_data` are tables, and site-packages differs from machine to machine.
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "turtledemo"}
)
_MAX_FILE_BYTES = 200_000
_HELD_OUT_EVERY = 16


class CorpusError(TKernelsError, RuntimeError):
    """This Python has too little of its standard library as source files to train on."""


@dataclass(frozen=True)
class Corpus:
    """Whole files, each as text; the two parts share none."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]


def standard_library_corpus(max_bytes: int) -> Corpus:
    """About `max_bytes` of the standard library's sources, the same ones on every machine that has this Python version.

    Files are taken in the order of a hash of their names, so that a smaller corpus is a fair sample of a larger one;
    one in 16 is held out. Raises CorpusError where there is less than half of `max_bytes`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    training: list[str] = []
    held_out: list[str] = []
    total_bytes = 0
    for index, path in enumerate(sorted(_source_files(root), key=lambda path: _hash(path.relative_to(root)))):
        if total_bytes >= max_bytes:
            break
        content = path.read_bytes()
        total_bytes += len(content)
        # The first file of each sixteen, so that even a handful of files has one.
        (training if index % _HELD_OUT_EVERY else held_out).append(content.decode("utf-8", errors="replace"))
    if total_bytes < max_bytes // 2:
        raise CorpusError(f"{root}: found {total_bytes} bytes of Python source, the recipe asks for {max_bytes}")
    return Corpus(tuple(training), tuple(held_out))


def _source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if 0 < path.stat().st_size <= _MAX_FILE_BYTES:
                yield path


def _hash(relative: Path) -> bytes:
    return hashlib.sha256(relative.as_posix().encode()).digest()
