"""Outside architecture files are imported in a process of their own first: one that hangs or exits is named."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from tkernels.isolation import Prepare, Server, Tell, Work
from tkernels.mode import MODE
from tkernels.outside import IMPORT_SECONDS
from tmodel.architectures import ArchitectureError, architectures_with


def why_broken(folders: Sequence[PurePath | str]) -> str | None:
    """Why `architectures_with(folders)` would raise, hang or end the process; None where it would not.

    Args:
        folders: Of outside architectures.
    """
    if not folders:
        return None
    server = Server({"TRITON_INTERPRET": "1" if MODE == "interpret" else "0"})
    try:
        server.load("tmodel.outside:prepare_imports")
        said: list[str] = []
        ending = server.run({"folders": [str(folder) for folder in folders]}, said.append, IMPORT_SECONDS)
    finally:
        server.end(patience=0.0)
    if said:
        return said[0]
    return None if ending.death is None else f"{', '.join(map(str, folders))}: cannot be imported: {ending.death}"


def prepare_imports(about: None) -> Prepare:
    """In a server: the task is a list of folders, which join the house's architectures."""

    def prepare(task: Mapping[str, list[str]]) -> Work:
        def work(tell: Tell) -> None:
            try:
                architectures_with(task["folders"])
            except ArchitectureError as error:
                tell(str(error))

        return work

    return prepare
