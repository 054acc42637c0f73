"""Files and folders that are there whole or not at all, whenever the process that writes them is killed."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""How the names of unfinished files end, which a killed process leaves behind."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write a file to. The file is on disk, and takes the place of `path`, when the block ends well.

    Raises:
        OSError: It cannot be written; the error names `path`.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with naming(path):
            yield partial
            with partial.open("rb") as file:
                os.fsync(file)
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file of UTF-8, in place of the one that is there."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an OSError of a write say which file it was about: the system's own do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def new_folder(path: Path, holds: str) -> Iterator[Path]:
    """Gives a folder to fill. It takes the place of `path` when the block ends well, and is removed when it does not.

    Args:
        path: New, or an empty folder.
        holds: What is written into it, for the error.

    Raises:
        FileExistsError: There is something at `path`.
    """
    check_new_folder(path, holds)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside `path`, so that one rename moves it; another process may be filling the same folder.
    unfinished = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    unfinished.mkdir()
    try:
        yield unfinished
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def check_new_folder(path: Path, holds: str) -> None:
    """Raises FileExistsError where there is something at `path` that is not an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty directory; {holds} is written to a new one")
