"""Tuned configs: where they are kept, which one a call gets, and how they are found.

A lockfile `tkernels/tuned/<device>.json` (an outside variant's: beside its file) holds one entry per op, variant, hash
of the kernel's code, Triton version and shape bucket, with the timing of every config that was tried.
"""

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import triton
from filelock import FileLock
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tkernels.config import Config, TuningMode
from tkernels.contract import Axes, Int
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.errors import TKernelsError
from tkernels.files import write_text
from tkernels.timing import time_call
from tkernels.variant import Variant

Match = Literal["exact", "other Triton version", "stale source", "default"]
Measure = Callable[[Callable[[], None]], float]
"""Runs a launch as often as it wants and returns microseconds; raises OutOfResources for a config that does not fit."""

ConfigTiming = tuple[Config, float | None, str]
"""A config, its microseconds or None, and why there are none."""

TUNED_FOLDER = Path(__file__).parent / "tuned"

IN_WORDS: Mapping[Match, str] = {
    "exact": "tuned",
    "other Triton version": "tuned under another Triton version",
    "stale source": "tuned before its code changed",
    "default": "default, by reasoning",
}
"""Where a config came from: only "exact" was measured with this very kernel."""


class TuningError(TKernelsError, ValueError):
    """A config was asked for that the lockfile does not have, or a lockfile that cannot be read."""


@dataclass(frozen=True)
class Entry:
    """One tuned kernel: its key, the best config, and (config, microseconds or null, why null) of every one tried."""

    op: str
    variant: str
    source: str
    triton: str
    bucket: str
    config: Config
    timings: tuple[ConfigTiming, ...]

    def best(self, allowed: Sequence[Config]) -> Config | None:
        """The fastest config that its variant still offers: one that was taken out may have been wrong."""
        return _fastest_config([timing for timing in self.timings if timing[0] in allowed])

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.op, self.variant, self.source, self.triton, self.bucket

    def as_json(self) -> dict[str, Any]:
        timings = [{"config": c.as_dict(), "us": us, "reason": why} for c, us, why in self.timings]
        names = ("op", "variant", "source", "triton", "bucket")
        return {**{n: getattr(self, n) for n in names}, "config": self.config.as_dict(), "timings": timings}

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Entry":
        timings = tuple((Config.of(t["config"]), _parse_microseconds(t["us"]), t["reason"]) for t in row["timings"])
        op, variant, source, version, point = (row[n] for n in ("op", "variant", "source", "triton", "bucket"))
        return Entry(op, variant, source, version, point, Config.of(row["config"]), timings)


def _parse_microseconds(value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"us must be a number or null, got {value!r}")
    return value


def bucket(variant: Variant, axes: Axes) -> str:
    """The part of the axes that selects a config: dtypes and key axes, sizes rounded up to a power of two."""
    parts = []
    fixed = {axis for option in variant.left_out for axis in variant.contract.options[option]}
    for axis in variant.contract.axes:
        if axis.name in fixed:  # an option that it does not take changes none of its launches
            continue
        value = axes.get(axis.name)
        if axis.name in variant.key and isinstance(axis, Int) and isinstance(value, int):
            parts.append(f"{axis.name}<={1 << max(value - 1, 0).bit_length()}")
        elif axis.name in variant.key or (isinstance(value, str) and hasattr(torch, value)):
            parts.append(f"{axis.name}={value}")
    return ",".join(parts)


def lockfile(variant: Variant, device: DeviceFacts, folder: Path = TUNED_FOLDER) -> Path:
    """Where a variant's entries for a device live."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", device.name).strip("_") + ".json"
    inside = Path(__file__).parent in variant.file.parents
    return (folder if inside else variant.file.parent) / name


def read_lockfile(path: Path) -> dict[tuple[str, ...], Entry]:
    """The entries of a lockfile by key; none where there is no file."""
    if not path.exists():
        return {}
    try:
        rows = json.loads(path.read_text())["entries"]
        return {entry.key: entry for entry in map(Entry.of, rows)}
    except (ValueError, KeyError, TypeError) as error:  # no JSON, no UTF-8, no legal config
        raise TuningError(f"{path}: not a lockfile: {type(error).__name__}: {error}") from error


def record(path: Path, device: DeviceFacts, entry: Entry) -> Entry:
    """Adds an entry, keeping the timings of configs it did not try again; returns it as it now stands.

    Atomic, and safe against other processes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        entries = read_lockfile(path)
        if before := entries.get(entry.key):
            tried = {config for config, _, _ in entry.timings}
            timings = (*entry.timings, *(t for t in before.timings if t[0] not in tried))
            best = _fastest_config(timings)
            assert best is not None, "an entry names a config that was timed"
            entry = replace(entry, config=best, timings=timings)
        entries[entry.key] = entry
        rows = [entries[key].as_json() for key in sorted(entries)]
        write_text(path, json.dumps({"device": device.name, "arch": device.arch, "entries": rows}, indent=1) + "\n")
        return entry


def _fastest_config(timings: Sequence[ConfigTiming]) -> Config | None:
    """The first of the fastest; None where nothing was timed."""
    timed = [(us, index) for index, (_, us, _) in enumerate(timings) if us is not None]
    return timings[min(timed)[1]][0] if timed else None


def median_us(launch: Callable[[], None]) -> float:
    """The default measure: events around eager launches on the current CUDA device, cold L2."""
    return time_call(launch, torch.device("cuda", torch.cuda.current_device()), warmup=5).median_us


def candidates(variant: Variant, arch: str) -> tuple[Config, ...]:
    """What tuning tries: the configs, and the architecture's default, so that a tuned one is never slower than it."""
    return tuple(dict.fromkeys((variant.default_config(arch), *(variant.configs or ()))))


@dataclass(frozen=True)
class Tuning:
    """How configs are chosen. Interpretation and inspection always use the defaults.

    nearest: the exact entry, else another Triton version's, else a stale source's (each said once), else the default.
    frozen: the exact entry or a TuningError. search: the exact entry, once every config was timed: what is missing
    is timed now and recorded.
    """

    mode: TuningMode = "nearest"
    folder: Path = TUNED_FOLDER
    measure: Measure = median_us
    _resolved: dict[tuple[str, ...], tuple[Config, Match]] = field(default_factory=dict, repr=False, compare=False)
    _files: dict[Path, dict[tuple[str, ...], Entry]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(TuningMode):
            raise TuningError(f"tuning {self.mode!r}: there is {', '.join(get_args(TuningMode))}")

    def resolve(
        self,
        variant: Variant,
        axes: Axes,
        device: DeviceFacts,
        launch: Callable[[Config], Callable[[], None]] | None = None,
    ) -> Config:
        """The config for a call. `launch` builds a launch on clones of the call's tensors, for `search`."""
        if device == INTERPRETER:
            return variant.default_config(device.arch)
        key = _resolved_key(variant, axes, device)
        found = self._resolved.get(key)
        if found is None:
            found = self._find_config(variant, axes, device, launch)
            self._resolved[key] = found
        return found[0]

    def match(self, variant: Variant, axes: Axes, device: DeviceFacts) -> Match:
        """How the config for a call was found; resolves it where that was not done yet."""
        self.resolve(variant, axes, device)
        key = _resolved_key(variant, axes, device)
        return self._resolved[key][1] if key in self._resolved else "default"

    @property
    def used(self) -> dict[str, dict[str, Any]]:
        """What was resolved so far, "op.variant[bucket]" -> config and how it matched; a run records it."""
        return {
            f"{op}.{variant}[{point}]": {"config": config.as_dict(), "match": match}
            for (op, variant, _, _, point), (config, match) in sorted(self._resolved.items())
        }

    def _find_config(
        self, variant: Variant, axes: Axes, device: DeviceFacts, launch: Callable[[Config], Callable[[], None]] | None
    ) -> tuple[Config, Match]:
        path = lockfile(variant, device, self.folder)
        if path not in self._files:
            self._files[path] = read_lockfile(path)
        entries, point = self._files[path], bucket(variant, axes)
        name, offered = variant.contract.name, candidates(variant, device.arch)
        exact = entries.get(tuning_key(variant, point))
        if (
            self.mode == "search"
            and launch is not None
            and not _capturing()
            and missing_configs(variant, device, exact)
        ):
            exact = entries[tuning_key(variant, point)] = search(variant, device, point, launch, self.measure, path)
        found = nearest_entry(variant, point, entries, offered)
        if self.mode == "frozen" and (found is None or found[1] != "exact"):
            raise TuningError(
                f"{name}.{variant.name}: tuning is frozen and {path.name} has no entry for source {variant.source}, "
                f"Triton {triton.__version__}, {point}"
            )
        if found is not None:
            entry, match = found
            best = entry.best(offered)
            assert best is not None
            if match != "exact":
                warnings.warn(f"{name}.{variant.name} [{point}]: config tuned with {match}", stacklevel=2)
            return best, match
        return variant.default_config(device.arch), "default"


def nearest_entry(
    variant: Variant, point: str, entries: Mapping[tuple[str, ...], Entry], offered: Sequence[Config]
) -> tuple[Entry, Match] | None:
    """Of a lockfile's entries, the one whose config a call gets: the exact one, else another Triton version's, else a
    stale source's, the newest version first; None where none has a config that is still offered.
    """
    op, name, source, triton_version, _ = tuning_key(variant, point)
    fitting = [e for e in entries.values() if (e.op, e.variant, e.bucket) == (op, name, point)]
    newest_first = sorted(fitting, key=lambda e: _version(e.triton), reverse=True)
    near = [e for e in newest_first if e.best(offered) is not None]
    wanted: tuple[tuple[Match, Callable[[Entry], bool]], ...] = (
        ("exact", lambda e: (e.source, e.triton) == (source, triton_version)),
        ("other Triton version", lambda e: e.source == source),
        ("stale source", lambda e: True),
    )
    return next(((e, match) for match, fits in wanted for e in near if fits(e)), None)


def tuning_key(variant: Variant, point: str) -> tuple[str, str, str, str, str]:
    """The key of an entry: op, variant, hash of the code, Triton version, shape bucket."""
    return variant.contract.name, variant.name, variant.source, triton.__version__, point


def _resolved_key(variant: Variant, axes: Axes, device: DeviceFacts) -> tuple[str, ...]:
    return variant.contract.name, variant.name, str(variant.file), device.name, bucket(variant, axes)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def missing_configs(variant: Variant, device: DeviceFacts, entry: Entry | None) -> list[Config]:
    """The configs that an entry has no timing of, a refusal included."""
    tried = {config for config, _, _ in entry.timings} if entry else set()
    return [config for config in candidates(variant, device.arch) if config not in tried]


def search(
    variant: Variant,
    device: DeviceFacts,
    point: str,
    launch: Callable[[Config], Callable[[], None]],
    measure: Measure,
    path: Path,
    tried: Callable[[ConfigTiming], None] = lambda timing: None,
) -> Entry:
    """Times the configs that the lockfile's entry lacks, records each as it is known, and returns the whole entry.

    One that does not fit the device, or that its compiler refuses, is recorded with its reason and skipped. An
    interrupted search goes on where it was.

    Args:
        point: The shape bucket.
        launch: Builds a config's launch on tensors of its own.
        path: The lockfile.
        tried: Told each new timing.

    Raises:
        TuningError: No config could be timed, with every reason.
    """
    key = tuning_key(variant, point)
    known = read_lockfile(path).get(key)
    pending: list[ConfigTiming] = []
    for config in missing_configs(variant, device, known):
        try:
            timing: ConfigTiming = (config, measure(launch(config)), "")
        except (OutOfResources, CompilationError, PTXASError) as error:
            timing = (config, None, " ".join(str(error).split()))
        tried(timing)
        pending.append(timing)
        if known or any(us is not None for _, us, _ in pending):  # an entry names a best config: one must have run
            known = record(path, device, Entry(*key, config=config, timings=tuple(pending)))
            pending = []
    if known is None:
        reasons = "; ".join(f"{config.as_dict()}: {why}" for config, _, why in pending)
        raise TuningError(f"{variant.contract.name}.{variant.name}: no config could be timed: {reasons}")
    return known


def tuned_devices(variant: Variant, folder: Path = TUNED_FOLDER) -> list[str]:
    """The devices that this very code was tuned on; where there is none, every config is a default by reasoning."""
    found = []
    home = lockfile(variant, INTERPRETER, folder).parent
    for path in sorted(home.glob("*.json")):
        try:
            entries = read_lockfile(path)
        except TuningError:  # an outside variant's folder may hold any JSON
            continue
        if any((e.op, e.variant, e.source) == tuning_key(variant, "")[:3] for e in entries.values()):
            found.append(str(json.loads(path.read_text())["device"]))
    return found


NEAREST = Tuning("nearest")
