"""`tk inspect --predict`: what a model says of every variant's time on GPUs that are not there."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.commands.choices import choose_variants, describe_open_axes, only_contract, open_registry, parse_point
from experiments.commands.output import end_with, name_some, print_json, progress_bar
from experiments.commands.requests import InspectRequest
from experiments.document import ExperimentError
from experiments.foretelling.agreement import Agreement, agreements, mean_regret
from experiments.foretelling.points import PredictedRow, points_of, predict, quickstart_points
from experiments.foretelling.published import Residual, residuals
from experiments.reporting.modelled import format_modelled
from experiments.reporting.table_style import Column, PlainTable, build_table, number_column
from experiments.runs.reading import read_run
from experiments.stages.foretold import kept_rows, own_table
from tkernels import OPS, Registry
from tkernels.contract import Axes
from tkernels.prediction import kept
from tkernels.prediction.compiled import compile_facts, list_missing, of_todays_code
from tkernels.prediction.gpus import Gpu, UnknownGpuError, find_gpu
from tkernels.variant import Variant
from tkernels.verification.ahead_of_time import CompilationError

EXPECTED = kept.FOLDER / "foretold.json"
"""The model's times of the project's own variants: op.variant -> point -> GPU -> microseconds."""


def run(request: InspectRequest) -> int:
    """Compiles what the kept table lacks, predicts and prints; returns 1 where nothing could be predicted."""
    gpus = _find_gpus(str(request.predict))
    ops = open_registry(request.variants_from)
    variants = choose_variants(ops, request.op, request.variant)
    points = points_of(variants) if request.axes is None else _points_at(variants, request.axes)
    if not points:
        raise ExperimentError(["--predict: no variant with kernels among those named"])
    if request.update_expected and (request.op or request.variant or request.variants_from or request.axes):
        raise ExperimentError(["--update-expected writes the built-in variants' times, of all of them together"])
    kept_points = [*points, *quickstart_points()] if request.update_expected else points
    for arch in dict.fromkeys(gpu.facts.arch for gpu in gpus):
        gpu = next(gpu for gpu in gpus if gpu.facts.arch == arch)
        _compile_missing(ops, kept_points, gpu, request.update_expected)
    rows = [row for gpu in gpus for row in _predict(points, gpu)]
    if request.update_expected:
        _write_expected(rows)
    _show(request, ops, rows)
    if all(row.foretold.us is None for row in rows):
        reasons = dict.fromkeys(f"{row.op}.{row.variant}: {row.foretold.reason}" for row in rows)
        return end_with(1, f"nothing was predicted: {name_some([*reasons])}")
    return 0


def _points_at(variants: Sequence[Variant], text: str) -> list[tuple[Variant, str, Axes]]:
    """One point: the axes that are named, with a realistic point's."""
    axes = parse_point(only_contract(variants, "--axes"), text, "--axes")
    return [(one, "axes", axes) for one in variants if one.launch is not None or one.parts]


def _find_gpus(names: str) -> list[Gpu]:
    try:
        return [find_gpu(name.strip()) for name in names.split(",")]
    except UnknownGpuError as error:
        raise ExperimentError([f"--predict: {error}"]) from None


def _compile_missing(ops: Registry, points: Sequence[tuple[Variant, str, Axes]], gpu: Gpu, is_for_tree: bool) -> None:
    """Compiles what no kept row is of, and keeps it: in the tree, or in the user's cache folder."""
    arch = gpu.facts.arch
    path = kept.table_path(arch) if is_for_tree else own_table(arch)
    if is_for_tree:
        kept.update(path, lambda rows: of_todays_code(rows, ops))
    wanted = [(variant, axes) for variant, _, axes in points]
    missing = list_missing(wanted, gpu.facts, kept.read(path) if is_for_tree else kept_rows(arch))
    if not missing:
        return
    failed = []
    try:
        with progress_bar("compile", len(missing)) as update:
            for one in missing:
                facts, lost = compile_facts(ops, [one], arch)
                failed += [f"{row.name}: {row.reason}" for row in lost]
                kept.add(path, facts)
                update(advance=1, doing=f"{one[0].contract.name}.{one[0].name} for {arch}")
    except CompilationError as error:
        raise ExperimentError([str(error)]) from None
    if failed:
        Console(stderr=True).print(Text(f"not compiled: {name_some(failed)}", "yellow"), soft_wrap=True)


def _predict(points: Sequence[tuple[Variant, str, Axes]], gpu: Gpu) -> list[PredictedRow]:
    with progress_bar("predict", len(points)) as update:
        return list(predict(points, gpu, kept_rows(gpu.facts.arch), lambda name: update(advance=1, doing=name)))


def _write_expected(rows: Sequence[PredictedRow]) -> None:
    """Writes the times of these rows' GPUs anew, of code that is each call's own; those of other GPUs stay."""
    again = {row.gpu for row in rows}
    before: dict[str, Any] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    times = {
        (name, point, gpu): us
        for name, points in before.items()
        for point, by_gpu in points.items()
        for gpu, us in by_gpu.items()
        if gpu not in again
    }
    for row in rows:
        if row.op in OPS and row.foretold.us is not None and not row.foretold.compiled_for:
            times[f"{row.op}.{row.variant}", row.point, row.gpu] = round(row.foretold.us, 3)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, point, gpu in sorted(times):
        table.setdefault(name, {}).setdefault(point, {})[gpu] = times[name, point, gpu]
    EXPECTED.write_text(json.dumps(table, indent=1) + "\n")
    print(f"written: {EXPECTED}", file=sys.stderr)


def _show(request: InspectRequest, ops: Registry, rows: Sequence[PredictedRow]) -> None:
    found = residuals(ops, kept_rows, request.op) if not request.as_json else []
    compared = _compare(request.against, rows) if request.against is not None else None
    if request.as_json:
        print_json([row.as_json() for row in rows])
        return
    console = Console()
    for gpu in dict.fromkeys(row.gpu for row in rows):
        console.print(_predicted_table(gpu, [row for row in rows if row.gpu == gpu]).as_rich())
    if request.axes is not None:
        console.print(Text(describe_open_axes(request.axes, rows[0].axes)))
    if found:
        console.print(_residual_table(found).as_rich())
    if compared is not None:
        _print_agreement(console, compared)


def _predicted_table(gpu: str, rows: Sequence[PredictedRow]) -> PlainTable:
    shown = [row for row in rows if not row.foretold.is_unsupported]
    show = {
        Column("variant"): lambda row: row.variant,
        Column("point"): lambda row: row.point + " *" * row.is_mark,
        number_column("modelled us"): lambda row: format_modelled(row.foretold.us),
        number_column("at least us"): lambda row: format_modelled(row.foretold.limit_us),
        Column("bound by"): lambda row: row.foretold.bound or "-",
    }
    caption = (
        "No figure here was measured. * a mark is judged there; at least: what the data sheet's peaks allow; bound by: "
        "see docs/profiling.md."
    )
    if reasons := {f"{row.op}.{row.variant}: {row.foretold.reason}": None for row in shown if row.foretold.us is None}:
        caption += f" Not modelled: {name_some([*reasons])}."
    return build_table(f"Modelled on {gpu}", show, shown, caption, lambda row: row.op)


def _residual_table(found: Sequence[Residual]) -> PlainTable:
    show = {
        Column("point"): lambda row: row.point,
        Column("published of"): lambda row: row.peer,
        number_column("published"): lambda row: f"{row.published:.2f}",
        Column("modelled of"): lambda row: row.variant,
        number_column("modelled"): lambda row: "-" if row.predicted is None else f"{row.predicted:.2f}",
        number_column("ratio"): lambda row: "-" if row.ratio is None else f"{row.ratio:.2f}",
    }
    caption = (
        "ratio: modelled over published. Above 1 the model is faster than others measured of a kernel of its kind."
    )
    heading = "{0.op}, {0.gpu}, {0.unit}"
    return build_table("Beside published figures", show, found, caption, heading.format)


def _compare(folder: Path, rows: Sequence[PredictedRow]) -> list[Agreement]:
    gpus = {row.gpu for row in rows}
    if len(gpus) > 1:
        raise ExperimentError([f"--against compares one GPU's times: name one of {', '.join(sorted(gpus))}"])
    predicted: Mapping[tuple[str, str, str], float] = {
        (row.op, row.variant, row.point): row.foretold.us for row in rows if row.foretold.us is not None
    }
    return agreements(read_run(folder).rows, predicted)


def _print_agreement(console: Console, found: Sequence[Agreement]) -> None:
    judged = [one for one in found if one.variants]
    if not judged:
        console.print("Rank agreement and regret: not measured.")
        return
    show = {
        Column("point"): lambda row: row.point,
        number_column("variants"): lambda row: str(row.variants),
        number_column("tau"): lambda row: "-" if row.tau is None else f"{row.tau:.2f}",
        Column("chosen"): lambda row: row.chosen,
        Column("fastest"): lambda row: row.best,
        number_column("regret"): lambda row: "-" if row.regret is None else f"{row.regret:.1%}",
    }
    taus = [one.tau for one in judged if one.tau is not None]
    tau = f"{sum(taus) / len(taus):.2f}" if taus else "not measured"
    caption = f"Kendall's tau, mean over points: {tau}; regret of the model's choice, geometric mean: "
    caption += f"{mean_regret(judged) or 0.0:.1%}."
    console.print(
        build_table("The model's order beside what was measured", show, judged, caption, lambda row: row.op).as_rich()
    )
