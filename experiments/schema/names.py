"""The names that an experiment may use, told from folders and tables alone: nothing here imports torch."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo

from experiments.document import entries
from experiments.peers import KERNELS as PEER_KERNELS
from experiments.peers import PEERS
from tsched.options import DEVICE
from tsched.torch_free import folder_of, load_from_file, suggest_name


@dataclass(frozen=True)
class KnownNames:
    """What an experiment's names are checked against; the context of its validation.

    Attributes:
        folder: Where the experiment's relative paths start.
        variants: Op -> its variants, of the house, the peers and the outside folders that are there.
        is_complete: Whether all outside folders are there.
    """

    folder: Path
    variants: Mapping[str, Sequence[str]]
    is_complete: bool


def known_names(folder: Path, variants_from: Any) -> KnownNames:
    """The names for an experiment in `folder`; `variants_from` is that section as it was written."""
    folders = [folder / str(given) for given in entries(variants_from)]
    there = [one for one in folders if os.path.isdir(one)]
    return KnownNames(folder, variant_names(there), len(there) == len(folders))


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """The message for an unknown name, with the alternatives and the nearest."""
    known = list(known)
    return f"unknown {kind} {name!r}: there is {', '.join(known)}{suggest_name(name, known)}"


def variant_names(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """op -> its variants, of the house, the peers and outside `folders`, as the registry finds them."""
    listing = load_from_file("folders")
    names: dict[str, list[str]] = listing.variant_names([listing.BUILT_IN, PEER_KERNELS, *folders])
    return names


@cache
def preset_names() -> tuple[str, ...]:
    """The models that tmodel can make, as its own table has them."""
    table = json.loads((folder_of("tmodel") / "presets.json").read_text(encoding="utf-8"))
    return tuple(name for presets in table.values() for name in presets)


def _check_peer(name: str) -> str:
    if name not in PEERS:
        raise ValueError(unknown_name("peer", name, PEERS))
    return name


def _check_device(name: str) -> str:
    if not DEVICE.fullmatch(name):
        raise ValueError(f"{name!r} is not a device; there is cpu, cuda")
    return name


def _in_folder(is_there: Callable[[Path], bool], fault: str) -> AfterValidator:
    """Checks a path that starts from the experiment's folder."""

    def check(path: Path, info: ValidationInfo[KnownNames]) -> Path:
        if not is_there(whole := info.context.folder / path):
            raise ValueError(f"{whole}{fault}")
        return path

    return AfterValidator(check)


Peer = Annotated[str, AfterValidator(_check_peer)]
Device = Annotated[str, AfterValidator(_check_device)]
Folder = Annotated[Path, _in_folder(os.path.isdir, " is not a folder")]
File = Annotated[Path, _in_folder(os.path.isfile, ": no such file")]
