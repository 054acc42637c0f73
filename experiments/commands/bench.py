"""`tk bench`: variants and peers at realistic points, checked, then timed, beside each other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import get_args

import torch
from rich.console import Console
from rich.text import Text

from experiments.commands.choices import choose_variants, describe_open_axes, only_contract, open_registry, parse_point
from experiments.commands.output import end_interrupted, end_with, print_json, progress_bar
from experiments.commands.requests import BenchRequest
from experiments.exits import check_name
from experiments.peers import slack_of, with_peers
from experiments.reporting.table_style import format_microseconds, make_table
from tkernels.device import device_facts, first_device
from tkernels.measurement import INTERPRETED, Measurement, Method, benchmark_points, measure
from tkernels.nearest import IN_WORDS
from tkernels.timing import Cache, Launch


def run(request: BenchRequest) -> int:
    """Prints the figures; 1 where a variant was wrong or failed."""
    check_name("--launch", request.launch, get_args(Launch))
    check_name("--l2", request.l2, get_args(Cache))
    method = Method(request.launch, request.l2, request.samples)  # type: ignore[arg-type]  # two of those names
    variants = choose_variants(with_peers(open_registry(request.variants_from)), request.op, request.variant)
    device = first_device()
    of_ops = {one.contract.name: [v for v in variants if v.contract.name == one.contract.name] for one in variants}
    points = {op: benchmark_points(own[0].contract, device, own) for op, own in of_ops.items()}
    work = [(variant, *point) for variant in variants for point in points[variant.contract.name].items()]
    if request.axes is not None:
        axes = parse_point(only_contract(variants, "--axes"), request.axes, "--axes", device)
        work = [(variant, request.axes, axes) for variant in variants]
    rows, is_interrupted = [], False
    with progress_bar("bench", len(work)) as update:
        try:
            for variant, name, axes in work:
                update(doing=f"{variant.contract.name}.{variant.name} {name}")
                rows.append(measure(variant, name, axes, device, method=method, slack=slack_of(variant)))
                update(advance=1)
        except KeyboardInterrupt:
            is_interrupted = True
    bad = [f"{_name(row)} at {row.point} {row.status}" for row in rows if row.status in ("wrong", "failed", "void")]
    if request.as_json:
        print_json([{"device": device_facts(device).name, **row.as_dict()} for row in rows])
    else:
        _print(Console(), rows, device, method)
        if request.axes is not None and rows:
            Console().print(Text(describe_open_axes(request.axes, rows[0].axes)))
    if is_interrupted:
        left = [f"{one.contract.name}.{one.name} at {point}" for one, point, _ in work[len(rows) :]]
        return end_interrupted(len(work), "timings", left)
    return end_with(1, "; ".join(bad)) if bad else 0


def _print(console: Console, rows: Sequence[Measurement], device: torch.device, method: Method) -> None:
    where = device_facts(device).name if device.type == "cuda" else "CPU"
    for op in dict.fromkeys(row.op for row in rows):
        _print_op(console, f"{op} on {where}: median (IQR) us", [row for row in rows if row.op == op])
    for note in _notes(rows, method):
        console.print(Text(note))


def _print_op(console: Console, title: str, rows: Sequence[Measurement]) -> None:
    """A row for each point, a column for each variant that has a figure."""
    names = list(dict.fromkeys(row.variant for row in rows if row.timing is not None))
    points: dict[str, dict[str, Measurement]] = {}
    for row in rows:
        points.setdefault(row.point, {})[row.variant] = row

    cells = (
        (point, _format_size(at), *(_format_figure(at.get(name)) for name in names)) for point, at in points.items()
    )
    console.print(make_table(title, ["point", "MB", *names], cells, right=["MB", *names]))


def _format_size(rows: Mapping[str, Measurement]) -> str:
    """The megabytes that a call moves at a point."""
    moved = (row.bytes_moved for row in rows.values() if row.bytes_moved is not None)
    return f"{next(moved, 0) / 1e6:.3g}"


def _format_figure(row: Measurement | None) -> str:
    if row is None or row.timing is None:
        return "-"
    share = f" {row.limit.fraction:.0%}" if row.limit and row.limit.fraction is not None else ""
    return f"{format_microseconds(row.timing.median_us)} ({row.timing.iqr_us:.2g}){share}"


def _notes(rows: Sequence[Measurement], method: Method) -> Iterator[str]:
    """What holds for several figures: the timer, why some have none, where the configs come from."""
    if timers := [row.timing.timer for row in rows if row.timing]:
        yield f"Timer: {timers[0]}; {method.samples} samples of each. Percentages: of the roofline."
    for reason, names in _group_names(rows, _why_untimed, partial(_name_untimed, rows)).items():
        yield f"{', '.join(names)}: {reason}"
    for words, names in sorted(_group_names(rows, _config_source, _name).items()):
        yield f"Configs ({words}): {', '.join(names)}"
    for reason in _group_names(rows, lambda row: row.limit.reason if row.limit else None, _name):
        yield f"No roofline: {reason}"


def _group_names(
    rows: Iterable[Measurement], words: Callable[[Measurement], str | None], name: Callable[[Measurement], str]
) -> dict[str, list[str]]:
    """What is said of rows -> their names, each once; rows of which nothing is said are left out."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if said := words(row):
            found.setdefault(said, {})[name(row)] = None
    return {said: list(names) for said, names in found.items()}


def _why_untimed(row: Measurement) -> str | None:
    if row.timing is not None:
        return None
    return f"not measured: {INTERPRETED}" if row.reason == INTERPRETED else f"{row.status}: {row.reason}"


def _config_source(row: Measurement) -> str | None:
    return IN_WORDS[row.config_source] if row.timing and row.config_source else None


def _name_untimed(rows: Sequence[Measurement], row: Measurement) -> str:
    """The variant's name, with the point unless the same holds at all of its points."""
    everywhere = all(other.reason == row.reason for other in rows if _name(other) == _name(row))
    return _name(row) if everywhere else f"{_name(row)} at {row.point}"


def _name(row: Measurement) -> str:
    return f"{row.op}.{row.variant}"
