"""Tuned configs: where they are kept, which one a call gets, and how they are found.

A lockfile `tkernels/tuned/<device>.json` (an outside variant's: beside its file) holds one entry per op, variant, hash
of the kernel's code, Triton version and shape bucket, with the timing of every config that was tried.
"""

import fcntl
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import triton

from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.variant import Variant

TuningMode = Literal["nearest", "frozen", "search"]
Match = Literal["exact", "other Triton version", "stale source", "default"]
Measure = Callable[[Callable[[], None]], float]
"""Runs a launch as often as it wants and returns microseconds; raises OutOfResources for a config that does not fit."""

TUNED_FOLDER = Path(__file__).parent / "tuned"


class TuningError(ValueError):
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
    timings: tuple[tuple[Config, float | None, str], ...]

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.op, self.variant, self.source, self.triton, self.bucket

    def as_json(self) -> dict[str, Any]:
        timings = [{"config": c.as_dict(), "us": us, "reason": why} for c, us, why in self.timings]
        names = ("op", "variant", "source", "triton", "bucket")
        return {**{n: getattr(self, n) for n in names}, "config": self.config.as_dict(), "timings": timings}

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Entry":
        timings = tuple((Config.of(t["config"]), t["us"], t["reason"]) for t in row["timings"])
        op, variant, source, version, point = (row[n] for n in ("op", "variant", "source", "triton", "bucket"))
        return Entry(op, variant, source, version, point, Config.of(row["config"]), timings)


def bucket(variant: Variant, axes: Axes) -> str:
    """The part of the axes that selects a config: dtypes and key axes, sizes rounded up to a power of two."""
    parts = []
    for axis in variant.contract.axes:
        value = axes.get(axis.name)
        if axis.name in variant.key and isinstance(value, int) and not isinstance(value, bool):
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
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise TuningError(f"{path}: not a lockfile: {type(error).__name__}: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def record(path: Path, device: DeviceFacts, entry: Entry) -> None:
    """Adds an entry, keeping the timings of configs it did not try again. Atomic, and safe against other processes."""
    with _locked(path):
        entries = read_lockfile(path)
        if before := entries.get(entry.key):
            tried = {config for config, _, _ in entry.timings}
            timings = (*entry.timings, *(t for t in before.timings if t[0] not in tried))
            entry = replace(entry, config=_best(timings), timings=timings)
        entries[entry.key] = entry
        rows = [entries[key].as_json() for key in sorted(entries)]
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(json.dumps({"device": device.name, "arch": device.arch, "entries": rows}, indent=1) + "\n")
        scratch.replace(path)


def _best(timings: tuple[tuple[Config, float | None, str], ...]) -> Config:
    timed = [(us, index) for index, (_, us, _) in enumerate(timings) if us is not None]
    if not timed:
        reasons = "; ".join(why for _, _, why in timings)
        raise TuningError(f"no config could be timed: {reasons}")
    return timings[min(timed)[1]][0]


def do_bench_us(launch: Callable[[], None]) -> float:
    """The default measure: Triton's do_bench, cold L2, launch cost included."""
    from triton.testing import do_bench

    return float(do_bench(launch, return_mode="median")) * 1e3


@dataclass(frozen=True)
class Tuning:
    """How configs are chosen. Interpretation and inspection always use the defaults.

    nearest: the exact entry, else another Triton version's, else a stale source's (each said once), else the default.
    frozen: the exact entry or a TuningError. search: the exact entry, else tune now and record.
    """

    mode: TuningMode = "nearest"
    folder: Path = TUNED_FOLDER
    measure: Measure = do_bench_us
    _resolved: dict[tuple[str, ...], tuple[Config, Match]] = field(default_factory=dict, repr=False, compare=False)
    _files: dict[Path, dict[tuple[str, ...], Entry]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.mode not in ("nearest", "frozen", "search"):
            raise TuningError(f"tuning {self.mode!r}: there is nearest, frozen, search")

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
        key = (variant.contract.name, variant.name, str(variant.file), device.name, bucket(variant, axes))
        found = self._resolved.get(key)
        if found is None:
            found = self._look_up(variant, axes, device, launch)
            self._resolved[key] = found
        return found[0]

    @property
    def used(self) -> dict[str, dict[str, Any]]:
        """What was resolved so far, "op.variant[bucket]" -> config and how it matched; a run records it."""
        return {
            f"{op}.{variant}[{point}]": {"config": config.as_dict(), "match": match}
            for (op, variant, _, _, point), (config, match) in sorted(self._resolved.items())
        }

    def _look_up(
        self, variant: Variant, axes: Axes, device: DeviceFacts, launch: Callable[[Config], Callable[[], None]] | None
    ) -> tuple[Config, Match]:
        path = lockfile(variant, device, self.folder)
        if path not in self._files:
            self._files[path] = read_lockfile(path)
        entries, point = self._files[path], bucket(variant, axes)
        name, source = variant.contract.name, variant.source
        exact = entries.get((name, variant.name, source, triton.__version__, point))
        if exact:
            return exact.config, "exact"
        if self.mode == "frozen":
            raise TuningError(
                f"{name}.{variant.name}: tuning is frozen and {path.name} has no entry for source {source}, "
                f"Triton {triton.__version__}, {point}"
            )
        if self.mode == "search" and launch is not None and not _capturing():
            entry = search(variant, point, launch, self.measure)
            record(path, device, entry)
            entries[entry.key] = entry
            return entry.config, "exact"
        candidates = [e for e in entries.values() if (e.op, e.variant, e.bucket) == (name, variant.name, point)]
        candidates = [e for e in candidates if set(e.config) == set(variant.default[""])]
        for match, fits in (
            ("other Triton version", [e for e in candidates if e.source == source]),
            ("stale source", candidates),
        ):
            if fits:
                best = max(fits, key=lambda e: _version(e.triton))
                warnings.warn(f"{name}.{variant.name} [{point}]: config tuned with {match}", stacklevel=2)
                return best.config, "other Triton version" if match == "other Triton version" else "stale source"
        return variant.default_config(device.arch), "default"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def search(variant: Variant, point: str, launch: Callable[[Config], Callable[[], None]], measure: Measure) -> Entry:
    """Times every config of a variant; one that does not fit the device is recorded with its reason and skipped."""
    from triton.runtime.errors import OutOfResources

    timings: list[tuple[Config, float | None, str]] = []
    for config in variant.configs:
        try:
            timings.append((config, measure(launch(config)), ""))
        except OutOfResources as error:
            timings.append((config, None, str(error)))
    op, source = variant.contract.name, variant.source
    return Entry(op, variant.name, source, triton.__version__, point, _best(tuple(timings)), tuple(timings))


NEAREST = Tuning("nearest")
