"""Tuning several variants at several points: what there is to time, and timing what no lockfile has yet."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tkernels.buckets import bucket
from tkernels.config import Config
from tkernels.contract import Int, Value
from tkernels.device import DeviceFacts, device_facts
from tkernels.launch import Kernel
from tkernels.lockfile import TUNED_FOLDER, ConfigTiming, Entry, TuningError, lockfile, read_lockfile, tuning_key
from tkernels.measurement import benchmark_points, prepare
from tkernels.preparation import axes_as_kept
from tkernels.tuning import Measure, Tuning, median_us, missing_configs, search
from tkernels.variant import Variant


@dataclass(frozen=True)
class TuningPoint:
    """A Triton variant at a point."""

    variant: Variant
    name: str
    axes: Mapping[str, Value]

    @property
    def title(self) -> str:
        return f"{self.variant.contract.name}.{self.variant.name} {self.name}"

    def refusal(self, facts: DeviceFacts) -> str | None:
        """Why the variant does not take the point on a device; None where it does."""
        return self.variant.refusal(axes_as_kept(self.variant, self.axes), facts)


def in_tuning_order(variants: Iterable[Variant]) -> list[Variant]:
    """The Triton variants; one without kernels of its own last, for it picks among the others as they were tuned."""
    return sorted((one for one in variants if one.kind == "triton"), key=lambda one: not one.kernels)


@dataclass(frozen=True)
class Tuned:
    """What a point's bucket came to. timed: how many configs now; known: before. Without an entry, the reason why."""

    point: TuningPoint
    entry: Entry | None
    timed: int
    known: int
    reason: str | None = None

    @property
    def microseconds(self) -> Mapping[Config, float]:
        return self.entry.microseconds if self.entry else {}


def points_of(variants: Sequence[Variant], device: torch.device) -> list[TuningPoint]:
    """Every realistic point of every Triton variant."""
    return [
        TuningPoint(variant, name, axes)
        for variant in variants
        if variant.kind == "triton"
        for name, axes in benchmark_points(variant.contract, device, (variant,)).items()
    ]


def one_per_bucket(points: Sequence[TuningPoint], facts: DeviceFacts) -> list[TuningPoint]:
    """The point that stands for each variant's bucket of shapes: of those that it supports, the one of the largest
    batch.

    The points of a bucket share a config, and at a small batch a kernel's time is its latency, whatever the config.

    Args:
        facts: Of the device that is tuned.
    """
    chosen: dict[tuple[str, str, str], TuningPoint] = {}
    for point in points:
        if point.refusal(facts) is not None:
            continue
        key = (point.variant.contract.name, point.variant.name, bucket(point.variant, point.axes))
        if key not in chosen or _batch(point) > _batch(chosen[key]):
            chosen[key] = point
    return list(chosen.values())


def _batch(point: TuningPoint) -> int:
    axes = point.variant.contract.axes
    return math.prod(int(point.axes[a.name]) for a in axes if isinstance(a, Int) and a.batch and a.name in point.axes)


def tune(
    points: Sequence[TuningPoint],
    device: torch.device,
    *,
    facts: DeviceFacts | None = None,
    folder: Path = TUNED_FOLDER,
    measure: Measure = median_us,
    tried: Callable[[TuningPoint, ConfigTiming], None] = lambda point, timing: None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Tuned]:
    """Times what the lockfiles in `folder` do not have yet, and yields each point as it is done.

    Args:
        facts: Of the device that is tuned, where it is not the one that the tensors are made on.
        tried: Told each timing.
        stop: Asked before each point; the rest is left for another run.
    """
    facts = device_facts(device) if facts is None else facts
    for point in points:
        if stop():
            return
        try:
            yield _tune(point, device, facts, folder, measure, tried)
        except (TuningError, ValueError, torch.OutOfMemoryError) as error:
            yield Tuned(point, None, 0, 0, " ".join(str(error).split()))


def _tune(
    point: TuningPoint, device: torch.device, facts: DeviceFacts, folder: Path, measure: Measure,
    tried: Callable[[TuningPoint, ConfigTiming], None],
) -> Tuned:  # fmt: skip
    variant = point.variant
    contract, path = variant.contract, lockfile(variant, facts, folder)
    case = prepare(variant, contract.case(point.axes, 0, device)).case  # tuned on the weight that it keeps
    arguments = contract.bind_arguments((), case.inputs)
    axes, where = contract.bind_axes(arguments)
    if reason := variant.refusal(axes, facts):
        return Tuned(point, None, 0, 0, reason)
    named = bucket(variant, axes)
    known = read_lockfile(path).get(tuning_key(variant, named))
    missing = missing_configs(variant, facts, known)
    before = len(known.timings) if known is not None else 0
    if known is not None and not missing:
        return Tuned(point, known, 0, before)
    # Its parts, where it runs others, have what was tuned before it.
    launch = Kernel(variant, Tuning("nearest", folder), {}).on_clones(axes, where, arguments)
    entry = search(variant, facts, named, launch, measure, path, lambda timing: tried(point, timing))
    return Tuned(point, entry, len(missing), before)
