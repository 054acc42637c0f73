"""Which outside variants `tk check` has found right: said in a file beside each, and by a run of those that have none.

A run checks its variants at its own points alone. `tk check` draws cases of every axis, misaligned and wide ones too.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from experiments.planning.plan import Plan
from experiments.runs.imports import imported_files
from experiments.runs.provenance import foreign_variants, sha256_of
from tkernels.mode import MODE
from tkernels.variant import Variant

_PEERS = Path(__file__).parents[1] / "peers"


def record_checked(variant: Variant) -> None:
    """Notes beside the variant's file that it was found right as it is now, in this way of running Triton's kernels.

    A folder that cannot be written into keeps no note: the variant then counts as never checked.
    """
    notes = _read_notes(variant) | {MODE: _code_hash(variant)}
    with contextlib.suppress(OSError):
        _notes_file(variant).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")


def unchecked_variants(plans: Iterable[Plan]) -> list[str]:
    """ "op.variant" of the outside ones that are used and were never found right by `tk check` as they are now."""
    return [
        name
        for name, variant in foreign_variants(plans).items()
        if _PEERS not in variant.file.parents and _read_notes(variant).get(MODE) != _code_hash(variant)
    ]


def _notes_file(variant: Variant) -> Path:
    return variant.file.with_suffix(".checked.json")


def _read_notes(variant: Variant) -> dict[str, str]:
    try:
        notes = json.loads(_notes_file(variant).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _code_hash(variant: Variant) -> str:
    """Of the variant's file and of what that imports from where neither this project nor a package is."""
    files = [variant.file, *imported_files(variant.file).values()]
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()
