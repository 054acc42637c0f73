"""Which ops and variants a folder holds: its file names alone say it, and the registry imports what is listed here,
where it can be read.

    <root>/<op>/contract.py      the op
    <root>/<op>/<variant>.py     one variant

Every other Python file of an op's folder is a variant, except those whose names start with an underscore, which serve
the variants beside them, or with a dot, which editors leave there. Folders whose names start with an underscore or a
dot are no ops. What else a name has to be, `fault_of_name` says.

Nothing is imported here but the standard library, so that names can be judged before torch is there. `import
tkernels.folders` imports `tkernels` and with it torch; a caller that must not loads this file by its path:

    spec = importlib.util.spec_from_file_location("tkernels_folders", folder_of_tkernels / "folders.py")
"""

import keyword
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUILT_IN = Path(__file__).parent / "ops"
"""The root of the ops of this package."""

MOST_BYTES = 4 << 20
"""Of a file: a longer one takes Python minutes and gigabytes to compile."""

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


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
        files = sorted(file for file in path.glob("*.py") if not file.name.startswith("."))
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


def fault_of_name(name: str) -> str | None:
    """Why nothing may be a variant or an op of this name; None where something may.

    Kernels, ranges and tables are called `<op>_<variant>`.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        return f"{name!r} is no name in lower case as Python has them, a letter and then letters a to z, digits and _"
    if keyword.iskeyword(name):
        return f"{name!r} is a word of Python's own"
    return "contract.py would define an op" if name == "contract" else None


def why_unreadable(file: Path) -> str | None:
    """Why a file is not to be imported, told without running or waiting for it; None where it may be."""
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            return f"is {_KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, not a file"
        if found.st_size > MOST_BYTES:
            return f"has {found.st_size:,} bytes; {MOST_BYTES:,} are the most that is read"
        file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"is a link to nothing, {file.readlink()}" if file.is_symlink() else "there is no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
    return None
