"""The files that keep tuned configs: an entry for each tuned kernel, with the timing of every config that was tried.

`tkernels/tuned/<device>.json` (an outside variant's: beside its file) holds one entry per op, variant, hash of the
kernel's code, Triton version and shape bucket.
"""

import json
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import triton
from filelock import FileLock

from tkernels.config import Config
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.errors import TKernelsError
from tkernels.files import write_text
from tkernels.variant import Variant

ConfigTiming = tuple[Config, float | None, str]
"""A config, its microseconds or None, and why there are none."""

TUNED_FOLDER = Path(__file__).parent / "tuned"


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
    def microseconds(self) -> dict[Config, float]:
        """The time of every config that could be timed."""
        return {config: us for config, us, _ in self.timings if us is not None}

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.op, self.variant, self.source, self.triton, self.bucket

    def as_json(self) -> dict[str, Any]:
        timings = [{"config": c.as_dict(), "us": us, "reason": why} for c, us, why in self.timings]
        return {**{name: getattr(self, name) for name in _KEY}, "config": self.config.as_dict(), "timings": timings}

    @staticmethod
    def of(row: Any) -> "Entry":
        """The inverse of `as_json`.

        Raises:
            ValueError: It is no entry; says what is wrong of it.
        """
        if not isinstance(row, Mapping):
            raise ValueError(f"must be an object, got {row!r}")
        op, variant, source, version, point = (_parse_text(row, name) for name in _KEY)
        timings = row.get("timings")
        if not isinstance(timings, list):
            raise ValueError(f"timings must be a list, got {timings!r}")
        entry = Entry(op, variant, source, version, point, _parse_config(row), tuple(map(_parse_timing, timings)))
        if entry.config not in entry.microseconds:
            raise ValueError(f"config {entry.config.as_dict()} has no time among the timings")
        return entry


_KEY = ("op", "variant", "source", "triton", "bucket")


def _parse_timing(row: Any) -> ConfigTiming:
    if not isinstance(row, Mapping):
        raise ValueError(f"a timing must be an object, got {row!r}")
    us = row.get("us")
    if us is not None and (isinstance(us, bool) or not isinstance(us, int | float)):
        raise ValueError(f"us must be a number or null, got {us!r}")
    if us is not None and not 0 < us <= sys.float_info.max:  # no NaN, and nothing that a ratio cannot be made of
        raise ValueError(f"us must be finite and above 0, got {us!r}")
    return _parse_config(row), us, _parse_text(row, "reason")


def _parse_config(row: Mapping[str, Any]) -> Config:
    values = row.get("config")
    if not isinstance(values, Mapping):
        raise ValueError(f"config must be an object, got {values!r}")
    try:
        return Config.of(values)
    except TypeError as error:  # a constant of a name that Python's call cannot take
        raise ValueError(f"config {values}: {error}") from None


def _parse_text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := row.get(name), str):
        raise ValueError(f"{name} must be text, got {value!r}")
    return value


def tuning_key(variant: Variant, point: str) -> tuple[str, str, str, str, str]:
    """The key of an entry: op, variant, hash of the code, Triton version, shape bucket."""
    return variant.contract.name, variant.name, variant.source, triton.__version__, point


def lockfile(variant: Variant, device: DeviceFacts, folder: Path = TUNED_FOLDER) -> Path:
    """Where a variant's entries for a device live."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", device.name).strip("_") + ".json"
    inside = Path(__file__).parent in variant.file.parents
    return (folder if inside else variant.file.parent) / name


@dataclass(frozen=True)
class Contents:
    """A lockfile, read. entries: by key. unreadable: what is no entry, as it stands there, and why it is none."""

    device: str
    entries: dict[tuple[str, ...], Entry]
    unreadable: tuple[tuple[Any, str], ...]


def parse_lockfile(path: Path) -> Contents:
    """All of a lockfile, each entry read by itself.

    Raises:
        TuningError: It is no lockfile.
    """
    try:
        file = json.loads(path.read_bytes())
    except OSError as error:  # a folder, for one
        raise TuningError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8
        raise TuningError(f"{path}: not a lockfile: {type(error).__name__}: {error}") from error
    if not isinstance(file, dict):
        raise TuningError(f"{path}: not a lockfile: it must be an object, got {type(file).__name__}")
    for name, kind, what in (("device", str, "text"), ("entries", list, "a list")):
        if not isinstance(value := file.get(name), kind):
            raise TuningError(f"{path}: not a lockfile: {name!r} must be {what}, got {type(value).__name__}")
    entries: dict[tuple[str, ...], Entry] = {}
    unreadable = []
    for number, row in enumerate(file["entries"], 1):
        try:
            entry = Entry.of(row)
        except ValueError as error:
            unreadable.append((row, f"entry {number}{_title_of(row)}: {error}"))
        else:
            entries[entry.key] = entry
    return Contents(file["device"], entries, tuple(unreadable))


def _title_of(row: Any) -> str:
    """What a row that is no entry says it is of."""
    if not isinstance(row, Mapping) or not {"op", "variant", "bucket"} <= row.keys():
        return ""
    return f" ({row['op']}.{row['variant']} [{row['bucket']}])"


def read_lockfile(path: Path) -> dict[tuple[str, ...], Entry]:
    """The entries of a lockfile by key; none where there is no file. A warning names what is no entry: it is left out.

    Raises:
        TuningError: As `parse_lockfile`.
    """
    if not path.exists():
        return {}
    contents = parse_lockfile(path)
    if contents.unreadable:
        # At one place, whoever reads the file: Python shows a warning of one place and text once.
        warnings.warn(f"{path}: left out: {'; '.join(why for _, why in contents.unreadable)}", stacklevel=1)
    return contents.entries


def record(path: Path, device: DeviceFacts, entry: Entry) -> Entry:
    """Adds an entry, keeping the timings of configs it did not try again; returns it as it now stands.

    Atomic, and safe against other processes. What is no entry stays as it is, for whoever can mend it, but for what has
    this entry's key.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        contents = parse_lockfile(path) if path.exists() else Contents(device.name, {}, ())
        entries = contents.entries
        if before := entries.get(entry.key):
            tried = {config for config, _, _ in entry.timings}
            timings = (*entry.timings, *(t for t in before.timings if t[0] not in tried))
            best = _fastest_config(timings)
            assert best is not None, "an entry names a config that was timed"
            entry = replace(entry, config=best, timings=timings)
        entries[entry.key] = entry
        rows = [entries[key].as_json() for key in sorted(entries)]
        rows += [
            row
            for row, _ in contents.unreadable
            if not isinstance(row, Mapping) or tuple(row.get(name) for name in _KEY) != entry.key
        ]
        write_text(path, json.dumps({"device": device.name, "arch": device.arch, "entries": rows}, indent=1) + "\n")
        return entry


def _fastest_config(timings: Sequence[ConfigTiming]) -> Config | None:
    """The first of the fastest; None where nothing was timed."""
    timed = [(us, index) for index, (_, us, _) in enumerate(timings) if us is not None]
    return timings[min(timed)[1]][0] if timed else None


def tuned_devices(variant: Variant, folder: Path = TUNED_FOLDER) -> list[str]:
    """The devices that this very code was tuned on; where there is none, every config is a default by reasoning."""
    found = []
    home = lockfile(variant, INTERPRETER, folder).parent
    for path in sorted(home.glob("*.json")):
        try:
            contents = parse_lockfile(path)
        except TuningError:  # an outside variant's folder may hold any JSON
            continue
        if any((e.op, e.variant, e.source) == tuning_key(variant, "")[:3] for e in contents.entries.values()):
            found.append(contents.device)
    return found


def version_of(text: str) -> tuple[int, ...]:
    """A version in the order of versions: "3.10" comes after "3.9"."""
    return tuple(int(part) for part in re.findall(r"\d+", text))
