"""How the config of a call is chosen, and how a missing one is found: by timing what a variant offers."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from tkernels.buckets import bucket, family
from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.device import INTERPRETER, DeviceFacts
from tkernels.lockfile import (
    TUNED_FOLDER,
    ConfigTiming,
    Entry,
    TuningError,
    lockfile,
    read_lockfile,
    record,
    tuning_key,
)
from tkernels.nearest import Match, find_nearest, foreign_classes, passed_over, same_order
from tkernels.timing import time_call
from tkernels.tuning_mode import TuningMode
from tkernels.variant import Variant

Measure = Callable[[Callable[[], None]], float]
"""Runs a launch as often as it wants and returns microseconds; raises OutOfResources for a config that does not fit."""


def median_us(launch: Callable[[], None]) -> float:
    """The default measure: replays of a CUDA graph on the current device, cold L2.

    From a graph, for Python takes 20 to 100 us to launch what may run for 10, and would rank the configs.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    return time_call(launch, device, warmup=5, launch="graph").median_us


def candidates(variant: Variant, arch: str) -> tuple[Config, ...]:
    """What tuning tries: the configs, and the architecture's default, so that a tuned one is never slower than it."""
    return tuple(dict.fromkeys((variant.default_config(arch), *(variant.configs or ()))))


def launchable(variant: Variant, arch: str) -> tuple[Config, ...]:
    """The candidates that the architecture can launch, of which a call gets one."""
    return tuple(config for config in candidates(variant, arch) if config.unmet_on(arch) is None)


@dataclass(frozen=True)
class Tuning:
    """How configs are chosen. Interpretation and inspection always use the defaults.

    nearest: the exact entry, else that of the nearest class, another Triton version's, a stale source's (each said
    once), else the default. frozen: the exact entry or a TuningError. search: the exact entry, once every config was
    timed: what is missing is timed now and recorded.

    Calls that differ in their class of the batch alone get configs that add up a row's sums in one order, where their
    variant is batch-invariant: the order that the first of them settled on.
    """

    mode: TuningMode = "nearest"
    folder: Path = TUNED_FOLDER
    measure: Measure = median_us
    _resolved: dict[tuple[str, ...], tuple[Config, Match]] = field(default_factory=dict, repr=False, compare=False)
    _shared: dict[tuple[str, ...], Sequence[Config]] = field(default_factory=dict, repr=False, compare=False)
    _files: dict[Path, dict[tuple[str, ...], Entry]] = field(default_factory=dict, repr=False, compare=False)
    _said: set[str] = field(default_factory=set, repr=False, compare=False)

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
        key = _resolved_key(variant, device, bucket(variant, axes))
        found = self._resolved.get(key)
        if found is None:
            found = self._find_config(variant, axes, device, launch)
            self._resolved[key] = found
        return found[0]

    def match(self, variant: Variant, axes: Axes, device: DeviceFacts) -> Match:
        """How the config for a call was found; resolves it where that was not done yet."""
        self.resolve(variant, axes, device)
        key = _resolved_key(variant, device, bucket(variant, axes))
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
        name, offered = variant.contract.name, launchable(variant, device.arch)
        exact = entries.get(tuning_key(variant, point))
        if (
            self.mode == "search"
            and launch is not None
            and not _capturing()
            and missing_configs(variant, device, exact)
        ):
            exact = entries[tuning_key(variant, point)] = search(variant, device, point, launch, self.measure, path)
        key = _resolved_key(variant, device, family(variant, point))
        found = find_nearest(variant, point, entries.values(), offered, self._shared.get(key))

        def why_not(config: Config) -> str | None:
            return config.unmet_on(device.arch) or f"{name}.{variant.name} does not offer it"

        match = None if found is None else found.match
        left_out = foreign_classes(variant, entries.values())
        left_out += passed_over(variant, point, [*entries.values()], offered, why_not, match)
        for said in (one for one in left_out if one not in self._said):
            self._said.add(said)
            warnings.warn(f"{path.name}: {said}", stacklevel=2)
        if self.mode == "frozen" and (found is None or found.match != "exact"):
            raise TuningError(
                f"{name}.{variant.name}: tuning is frozen and {path.name} has no entry for source {variant.source}, "
                f"Triton {triton.__version__}, {point}"
            )
        if found is None:
            default = variant.default_config(device.arch)
            self._shared.setdefault(key, same_order(variant, default, offered))
            return default, "default"
        self._shared.setdefault(key, same_order(variant, found.config, offered))
        if found.match != "exact":
            warnings.warn(f"{name}.{variant.name} [{point}]: config tuned with {found.match}", stacklevel=2)
        return found.config, found.match


def _resolved_key(variant: Variant, device: DeviceFacts, point: str) -> tuple[str, ...]:
    return variant.contract.name, variant.name, str(variant.file), device.name, point


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
        timing: ConfigTiming
        try:
            unmet = config.unmet_on(device.arch)
            timing = (config, None, unmet) if unmet is not None else (config, measure(launch(config)), "")
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


NEAREST = Tuning("nearest")
