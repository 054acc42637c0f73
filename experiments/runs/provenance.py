"""What a run was made of, so that it can be said later what made a difference: sources, tuned configs, files read."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from experiments.planning.plan import Plan
from experiments.runs.imports import imported_files
from experiments.runs.reading import workload_key
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.lockfile import TUNED_FOLDER, lockfile, read_lockfile
from tkernels.nearest import find_nearest
from tkernels.tuning import launchable
from tkernels.variant import Variant
from tkernels.verification.check import outside_folder

_MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.model")
_SHOWN_FROM_BYTES = 10**9


def variants_of(plans: Iterable[Plan]) -> dict[str, Variant]:
    """ "op.variant" -> every variant that some arm calls, outside ones too, by name."""
    found = {
        f"{op}.{pick.variant}": plan.ops[op].variants[pick.variant]
        for plan in plans
        for op, picks in plan.picks.items()
        for pick in picks
    }
    return dict(sorted(found.items()))


def source_files(plans: Sequence[Plan]) -> dict[Path, Path]:
    """Where in `sources/` the file of each variant that is used goes: "<op>/<variant>.py" -> the file. A `torch`
    variant is its op's contract. What outside ones import goes to "imports/<module>.py".
    """
    files = {Path(*name.split(".")).with_suffix(".py"): one.file for name, one in variants_of(plans).items()}
    return files | {Path("imports", f"{name}.py"): file for name, file in imports_of(plans).items()}


def imports_of(plans: Iterable[Plan]) -> dict[str, Path]:
    """Module -> its file, of all that variants import from where neither this project nor an installed package is."""
    found: dict[str, Path] = {}
    for variant in foreign_variants(plans).values():
        found |= imported_files(variant.file)
    return dict(sorted(found.items()))


def foreign_variants(plans: Iterable[Plan]) -> dict[str, Variant]:
    """Those of `variants_of` that are not built in: peers' and outside ones."""
    return {name: variant for name, variant in variants_of(plans).items() if outside_folder(variant) is not None}


def file_hashes(plan: Plan) -> dict[str, dict[str, str]]:
    """What else an experiment reads: of a workload's trace ("workload" and its name) and of "quantization.text" and
    ".calibration", the file's name and SHA-256.
    """
    served = {one.name: one.requests if one.kind == "http" else one for one in plan.experiment.workload}
    files = {workload_key(name): one.file for name, one in served.items() if one.kind == "trace"}
    quantization = plan.experiment.quantization
    if quantization is not None:
        texts = {"text": quantization.text, "calibration": quantization.calibration}
        files |= {f"quantization.{name}": plan.folder / file for name, file in texts.items() if file is not None}
    return {key: {"file": file.name, "sha256": sha256_of(file)} for key, file in files.items()}


def lockfile_hashes(plans: Iterable[Plan], device: DeviceFacts, folder: Path = TUNED_FOLDER) -> dict[str, str | None]:
    """Each lockfile that the variants' tuned configs are looked up in, by its name in `folder` or else its path, -> its
    SHA-256; None where there is none of that device. Empty where kernels are interpreted, which takes the defaults.
    """
    if device == INTERPRETER:
        return {}
    files = {lockfile(variant, device, folder) for variant in variants_of(plans).values() if variant.kind == "triton"}
    return {
        file.name if file.parent == folder else str(file): sha256_of(file) if file.exists() else None
        for file in sorted(files)
    }


def lockfile_entries(
    plans: Iterable[Plan], device: DeviceFacts, used: Iterable[str], folder: Path = TUNED_FOLDER
) -> dict[str, Any]:
    """`used` ("op.variant[bucket]", as in Tuning.used) -> the lockfile's entry that its config is from, with every
    timing; None where it was the default.
    """
    variants = variants_of(plans)
    found: dict[str, Any] = {}
    for key in used:
        name, _, point = key.removesuffix("]").partition("[")
        variant = variants[name]
        entries = read_lockfile(lockfile(variant, device, folder))
        nearest = find_nearest(variant, point, entries.values(), launchable(variant, device.arch))
        found[key] = nearest.entry.as_json() if nearest is not None else None
    return found


def model_hashes(plans: Iterable[Plan], console: Console | None = None) -> dict[str, dict[str, str]]:
    """Model -> its configuration's, tokenizer's and weights' files, by name -> SHA-256; of models that serve nothing
    in this experiment, nothing. Progress goes to `console` (stderr's by default) where it is more than a gigabyte.
    """
    files = _model_files(plans)
    total = sum(file.stat().st_size for some in files.values() for file in some)
    columns = (
        TextColumn("hashing the model"), BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = console if console is not None else Console(stderr=True)
    found: dict[str, dict[str, str]] = {name: {} for name in files}
    with Progress(*columns, console=console, transient=True, disable=total < _SHOWN_FROM_BYTES) as progress:
        task = progress.add_task("", total=total)
        for name, some in files.items():
            for file in some:
                with progress.open(file, "rb", total=total, task_id=task) as opened:
                    found[name][file.name] = _sha256(opened)
    return found


def _model_files(plans: Iterable[Plan]) -> dict[str, list[Path]]:
    """Model -> what is hashed of it, of those that serve."""
    served = {
        plan.model.directory().resolve(): plan.model.name
        for plan in plans
        if plan.model is not None and (plan.experiment.workload or plan.experiment.quantization)
    }
    return {
        _distinct_name(directory, served): sorted({file for one in _MODEL_FILES for file in directory.glob(one)})
        for directory in served
    }


def _distinct_name(directory: Path, names: Mapping[Path, str]) -> str:
    """What the model in a directory is called: its name or, where another has that too, as much of the directory as
    tells them apart.
    """
    others = [other for other, name in names.items() if other != directory and name == names[directory]]
    if not others:
        return names[directory]
    parts = directory.parts
    ends = (parts[-count:] for count in range(1, len(parts) + 1))
    return "/".join(next(end for end in ends if all(other.parts[-len(end) :] != end for other in others)))


def sha256_of(file: Path) -> str:
    """Of a file's bytes, in hex."""
    with file.open("rb") as opened:
        return _sha256(opened)


def _sha256(opened: Any) -> str:
    return hashlib.file_digest(opened, "sha256").hexdigest()
