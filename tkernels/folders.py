"""Which ops and variants a folder holds: its file names alone say it, and the registry imports what is listed here.

    <root>/<op>/contract.py      the op
    <root>/<op>/<variant>.py     one variant

Every other Python file of an op's folder is a variant, except those whose names start with an underscore, which serve
the variants beside them. Folders whose names start with an underscore or a dot are no ops.

Nothing is imported here but the standard library, so that names can be judged before torch is there. `import
tkernels.folders` imports `tkernels` and with it torch; a caller that must not loads this file by its path:

    spec = importlib.util.spec_from_file_location("tkernels_folders", folder_of_tkernels / "folders.py")
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = Path(__file__).parent / "ops"
"""The root of the ops of this package."""


@dataclass(frozen=True)
class OpFolder:
    """One op's folder under a root. contract: its contract.py, or None where it adds variants to an op of elsewhere."""

    path: Path
    contract: Path | None
    variants: tuple[Path, ...]

    @property
    def op(self) -> str:
        return self.path.name


def op_folders(root: Path) -> list[OpFolder]:
    """The op folders under `root` that hold any Python file, by name."""
    found = []
    for path in sorted(root.iterdir()):
        if not path.is_dir() or path.name.startswith(("_", ".")):
            continue
        files = sorted(path.glob("*.py"))
        contract = next((file for file in files if file.name == "contract.py"), None)
        variants = tuple(file for file in files if file != contract and not file.name.startswith("_"))
        if files:
            found.append(OpFolder(path, contract, variants))
    return found


def variant_names(roots: Sequence[Path]) -> dict[str, list[str]]:
    """Op -> the names of its variants under all `roots`; `torch`, made of the op's baseline, is the first of each.

    A folder of variants whose op no root before it has is left out: joining it is the registry's error.
    """
    names: dict[str, list[str]] = {}
    for root in roots:
        for folder in op_folders(root):
            if folder.contract is not None:
                names.setdefault(folder.op, ["torch"])
            if folder.op in names:
                names[folder.op] += [file.stem for file in folder.variants]
    return names
