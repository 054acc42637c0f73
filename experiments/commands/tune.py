"""`tk tune`: times the configs that the device's lockfile does not have, and keeps them there."""

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from experiments.commands.choices import choose_variants, cuda_device, open_registry, parse_point
from experiments.commands.output import progress_bar
from experiments.commands.requests import TuneRequest
from experiments.document import ExperimentError
from experiments.reporting.table_style import format_microseconds, make_table
from tkernels.buckets import bucket
from tkernels.device import TARGETS, DeviceFacts, device_facts
from tkernels.lockfile import TUNED_FOLDER, ConfigTiming, Entry, lockfile
from tkernels.tuning import Measure, candidates, median_us
from tkernels.tuning_session import Tuned, TuningPoint, in_tuning_order, one_per_bucket, points_of, tune
from tkernels.variant import Variant
from tsched.torch_free import suggest_name

# Without a GPU the plan is an H200's.
_DRY_RUN = TARGETS["sm_90"]


def run(request: TuneRequest) -> int:
    """Tunes and prints a table; 1 where a point could not be tuned."""
    if request.dry_run:
        facts = device_facts(cuda_device(request.device, "tk tune")) if torch.cuda.is_available() else _DRY_RUN
        print_plan(plan(request, facts), facts)
        return 0
    device = cuda_device(request.device, "tk tune")
    points = plan(request, device_facts(device))
    with torch.cuda.device(device):
        results = carry_out(points, device, device_facts(device), TUNED_FOLDER, median_us)
    return print_results(results, device_facts(device), TUNED_FOLDER)


def plan(request: TuneRequest, facts: DeviceFacts) -> list[TuningPoint]:
    """The points that were asked for, on a device of these facts; an ExperimentError names what is not one."""
    tunable = in_tuning_order(choose_variants(open_registry(request.variants_from), request.op, request.variant))
    if not tunable:
        raise ExperimentError(["nothing to tune: none of these is a Triton variant"])
    every = points_of(tunable, torch.device("cuda"))
    if not request.shapes:
        return one_per_bucket(every, facts)
    return [point for shape in request.shapes for point in _find_points(shape, tunable, every)]


def print_plan(points: Sequence[TuningPoint], facts: DeviceFacts) -> None:
    """A row for each bucket of shapes: the calls that share a config, and the point at which it is tuned. A point that
    was asked for and that its variant refuses has a line that says why.
    """
    refused = [(point, reason) for point in points if (reason := point.refusal(facts)) is not None]
    rows = [
        [
            f"{point.variant.contract.name}.{point.variant.name}",
            bucket(point.variant, point.axes),
            point.name,
            str(len(candidates(point.variant, facts.arch))),
        ]
        for point in points
        if point.refusal(facts) is None
    ]
    title, console = f"What tk tune would time on {facts.name}", Console()
    console.print(make_table(title, ["variant", "calls", "tuned at", "configs"], rows, right=["configs"]))
    for point, reason in refused:
        console.print(Text(f"not tuned: {point.title}: {reason}"))


def _find_points(shape: str, variants: Sequence[Variant], every: Sequence[TuningPoint]) -> list[TuningPoint]:
    """The realistic points of that name, else one of those axes for each variant."""
    if named := [point for point in every if point.name == shape]:
        return named
    if len({variant.contract.name for variant in variants}) != 1:
        hint = suggest_name(shape, sorted({point.name for point in every}))
        raise ExperimentError([f"--shapes {shape}: no realistic point has that name{hint}; axes need an --op"])
    axes = parse_point(variants[0].contract, shape, f"--shapes {shape}")
    return [TuningPoint(variant, shape, axes) for variant in variants]


def carry_out(
    points: Sequence[TuningPoint], device: torch.device, facts: DeviceFacts, folder: Path, measure: Measure
) -> list[Tuned]:
    """Tunes under a progress bar of configs. What an interrupted run timed is kept, and the next one goes on there."""
    counts = [len(candidates(point.variant, facts.arch)) for point in points]
    results: list[Tuned] = []
    with progress_bar("tune", sum(counts)) as update:

        def tried(point: TuningPoint, timing: ConfigTiming) -> None:
            update(advance=1, doing=point.title)

        for result in tune(points, device, facts=facts, folder=folder, measure=measure, tried=tried):
            results.append(result)
            update(completed=sum(counts[: len(results)]))
    return results


def print_results(results: Sequence[Tuned], facts: DeviceFacts, folder: Path) -> int:
    """One row per point; 1 where any has no entry."""
    console = Console()
    right = ["timed", "kept", "skipped", "us", "default us"]
    tuned = [(result, result.entry) for result in results if result.entry is not None]
    rows = [_cells(result, entry, facts) for result, entry in tuned]
    console.print(make_table(f"Tuned configs on {facts.name}", ["point", *right, "config"], rows, right=right))
    for result in results:
        if result.reason is not None:
            console.print(Text(f"{result.point.title}: {result.reason}"))
    for path in sorted({lockfile(result.point.variant, facts, folder) for result, _ in tuned}):
        console.print(Text(f"Lockfile: {path}"), soft_wrap=True)
    return 0 if len(tuned) == len(results) else 1


def _cells(result: Tuned, entry: Entry, facts: DeviceFacts) -> Sequence[str]:
    times = result.microseconds
    default = times.get(result.point.variant.default_config(facts.arch))
    us = [format_microseconds(times[entry.config]), "-" if default is None else format_microseconds(default)]
    skipped = sum(us is None for _, us, _ in entry.timings)
    config = ", ".join(f"{name}={value}" for name, value in entry.config.as_dict().items())
    return result.point.title, str(result.timed), str(result.known), str(skipped), *us, config
