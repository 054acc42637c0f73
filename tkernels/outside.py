"""Outside variant files are imported in a process of their own first: one that hangs, exits or is broken harms itself
alone, and the others of its folder join the ops.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tkernels.contract import ContractError
from tkernels.folders import op_folders
from tkernels.isolation import Prepare, Server, Tell, Work
from tkernels.mode import MODE
from tkernels.registry import builtin_ops
from tkernels.variant import VariantError

IMPORT_SECONDS = 60.0
"""For one file, which may import a large library."""


def broken_files(folders: Sequence[Path]) -> dict[Path, str]:
    """The files of outside folders that cannot join the ops, each with its reason.

    Args:
        folders: as for `Registry.with_variants_from`, which then leaves these files out.
    """
    files = [(folder, file) for folder in folders if folder.is_dir() for file in variant_files(folder)]
    broken: dict[Path, str] = {}
    if not files:
        return broken
    server = Server({"TRITON_INTERPRET": "1" if MODE == "interpret" else "0"})
    try:
        server.load("tkernels.outside:prepare_imports")
        for folder, file in files:
            if (contract := file.with_name("contract.py")) in broken:
                broken[file] = broken[contract]
                continue
            said: list[str] = []
            ending = server.run({"folder": str(folder), "file": str(file)}, said.append, IMPORT_SECONDS)
            if said or ending.death is not None:
                broken[file] = said[0] if said else f"{file}: cannot be imported: {ending.death}"
    finally:
        server.end(patience=0.0)
    return broken


def variant_files(folder: Path) -> list[Path]:
    """The contracts and variants of an outside folder, each contract before its variants."""
    found = op_folders(folder.resolve())
    return [file for one in found for file in (one.contract, *one.variants) if file is not None]


def prepare_imports(about: None) -> Prepare:
    """In a server: each task is one file, which joins the ops without the other variants of its folder."""

    def prepare(task: Mapping[str, str]) -> Work:
        folder, file = Path(task["folder"]), Path(task["file"])
        needed = (file, file.with_name("contract.py"))
        others = dict.fromkeys((one for one in variant_files(folder) if one not in needed), "not asked for")

        def work(tell: Tell) -> None:
            try:
                builtin_ops().with_variants_from(folder, others)
            except (VariantError, ContractError) as error:
                tell(str(error))

        return work

    return prepare
