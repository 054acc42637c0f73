"""Outside architecture files are imported in a process of their own first: one that hangs or exits is named."""

from collections.abc import Sequence
from pathlib import PurePath

from tkernels.footprint import code_shared
from tkernels.isolation import Prepare, Work
from tkernels.outside import importing, side_by_side, work_of_import
from tmodel.architectures import ArchitectureError, architectures_with


def why_broken(folders: Sequence[PurePath | str]) -> str | None:
    """Why `architectures_with(folders)` would raise, hang or end the process; None where it would not.

    Args:
        folders: Of outside architectures.
    """
    if not folders:
        return None
    names = [str(folder) for folder in folders]
    with importing("tmodel.outside:prepare_imports") as import_faults:
        return next(iter(import_faults({", ".join(names): names}).values()), None)


def prepare_imports(about: None) -> Prepare:
    """In a server: the task is a list of folders, which join the house's architectures."""
    shared = code_shared()

    def prepare(folders: Sequence[str]) -> Work:
        return work_of_import(", ".join(folders), lambda enter: architectures_with(folders), ArchitectureError, shared)

    return side_by_side(prepare)
