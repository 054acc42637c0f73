"""Whether an experiment's names are known, told from folders and tables alone: nothing here imports torch."""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.document import Document, ExperimentError, PathParts, nearest
from experiments.peers import KERNELS as PEER_KERNELS
from experiments.peers import PEERS
from experiments.planning.axes import choices_of, entries
from experiments.planning.model_names import whole_sources
from experiments.schema import VariantChoice
from experiments.simulation.trace_files import trace_lines
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES

POLICIES: Mapping[str, Mapping[str, Any]] = {
    "order": ORDERS,
    "preemption": PREEMPTIONS,
    "prefix_cache": PREFIX_CACHES,
}


def _folder_of(package: str) -> Path:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def variant_names(folders: Sequence[Path] = ()) -> dict[str, list[str]]:
    """op -> its variants, of the house, the peers and outside `folders`, as the registry finds them."""
    file = _folder_of("tkernels") / "folders.py"
    # By its path: the package imports torch.
    spec = importlib.util.spec_from_file_location("tkernels_folders", file)
    assert spec is not None
    assert spec.loader is not None
    listing = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(listing)
    names: dict[str, list[str]] = listing.variant_names([listing.BUILT_IN, PEER_KERNELS, *folders])
    return names


@dataclass(frozen=True)
class Known:
    """op -> its variants. missing: the indices of the outside folders that are not there: what they would have had is
    not known.
    """

    variants: Mapping[str, Sequence[str]]
    missing: tuple[int, ...]


def known_names(document: Document) -> Known:
    """The names that the document's ops and variants may have."""
    written = [document.folder / str(given) for given in entries(document.data.get("variants_from"))]
    missing = tuple(index for index, folder in enumerate(written) if not os.path.isdir(folder))
    return Known(variant_names([folder for folder in written if os.path.isdir(folder)]), missing)


def preset_table() -> Mapping[str, Mapping[str, Any]]:
    """tmodel's presets, "trained" and "random", as its own table has them: name -> sizes."""
    file = _folder_of("tmodel") / "presets.json"
    table: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return table


def name_problems(document: Document, names: Known) -> list[str]:
    """Unknown ops, variants, policies, peers and presets, and folders and traces that are not there."""
    problems: list[str] = []
    folders = entries(document.data.get("variants_from"))
    for index in names.missing:
        message = f"{document.folder / str(folders[index])} is not a folder"
        problems.append(document.problem(("variants_from", index), message))
    perhaps = " (unless it is in the folder that is missing)" if names.missing else ""
    ops = names.variants
    for section in ("kernels", "shapes"):
        written = document.data.get(section)
        for op in written if isinstance(written, dict) else ():
            if op not in ops:
                problems.append(_unknown(document, (section, op), "op", op, list(ops)) + perhaps)
            elif section == "kernels":
                for index, choice in enumerate(choices_of(document, op)):
                    if isinstance(choice, VariantChoice) and choice.variant not in ops[op]:
                        where = ("kernels", op, index)
                        problems.append(_unknown(document, where, f"{op} variant", choice.variant, ops[op]) + perhaps)
    for place, options in enumerate(entries(document.data.get("scheduler"))):
        for kind, known in POLICIES.items() if isinstance(options, dict) else ():
            for index, name in enumerate(entries(options.get(kind))):
                if isinstance(name, str) and name not in known:
                    # Quoted: one of them is called 'none'.
                    message = f"unknown {kind} {name!r}: there is {', '.join(map(repr, known))}{nearest(name, known)}"
                    problems.append(document.problem(("scheduler", place, kind, index), message))
    problems += _trace_problems(document)
    problems += _model_problems(document)
    device = document.data.get("device")
    if isinstance(device, str) and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        problems.append(document.problem(("device",), f"{device!r} is not a device; there is cpu, cuda"))
    for index, peer in enumerate(entries(document.data.get("peers"))):
        if isinstance(peer, str) and peer not in PEERS:
            problems.append(_unknown(document, ("peers", index), "peer", peer, list(PEERS)))
    return problems


def with_whole_path(workload: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """An entry of `workload` whose trace is found from anywhere."""
    file = workload.get("file")
    return {**workload, "file": str((folder / file).resolve())} if isinstance(file, str) else dict(workload)


def _model_problems(document: Document) -> list[str]:
    """Presets and directories that are not there."""
    problems = []
    known = [name for presets in preset_table().values() for name in presets]
    for index, source in enumerate(entries(whole_sources(document.data.get("model"), document.folder))):
        given = source if isinstance(source, dict) and len(source) == 1 else {}
        preset, path = given.get("preset"), given.get("path")
        if isinstance(preset, str) and preset not in known:
            problems.append(_unknown(document, ("model", index), "preset", preset, known))
        if isinstance(path, str) and not os.path.isdir(path):
            problems.append(document.problem(("model", index), f"{path} is not a directory"))
    return problems


def _trace_problems(document: Document) -> list[str]:
    """Traces that cannot be read, or have fewer requests than are asked for."""
    problems = []
    for index, entry in enumerate(entries(document.data.get("workload"))):
        given = entry if isinstance(entry, dict) and entry.get("kind") == "trace" else {}
        if isinstance(given.get("file"), str):
            where: PathParts = ("workload", index, "file")
            try:
                count = len(trace_lines(document.folder / given["file"]))
            except (ExperimentError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) else None
                problems.append(document.problem(where, f"{given['file']}: {reason}" if reason else str(error)))
                continue
            asked = [one for one in entries(given.get("num_requests")) if isinstance(one, int)]
            if any(one > count for one in asked):
                message = f"{max(asked)} of a trace of {count}"
                problems.append(document.problem(("workload", index, "num_requests"), message))
    return problems


def _unknown(document: Document, where: PathParts, kind: str, name: str, known: Sequence[str]) -> str:
    return document.problem(where, f"unknown {kind} {name!r}: there is {', '.join(known)}{nearest(name, known)}")
