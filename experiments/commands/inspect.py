"""`tk inspect`: what every launcher compiles to, for GPUs that are not there."""

import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.commands.choices import choose_variants, only_contract, open_registry, parse_axes
from experiments.commands.output import end_interrupted, end_with, name_some, print_json, progress_bar
from experiments.commands.requests import InspectRequest
from experiments.document import ExperimentError
from experiments.exits import parse_names
from experiments.reporting.table_style import make_table
from tkernels import OPS, Registry
from tkernels.contract import Axes
from tkernels.device import TARGETS
from tkernels.variant import Variant
from tkernels.verification.ahead_of_time import CompilationError, compile_for
from tkernels.verification.inspection import expected, gates
from tkernels.verification.inspection.points import OUTSIDE_POINTS, POINTS
from tkernels.verification.inspection.rows import CompiledKernel

DUMPS = ("ptx", "sass")
_NUMBER = re.compile(r"; this is \w+$")  # of the architecture, which the line names
_ROOMY = 110  # columns of a terminal that has room for occupancies beside registers

Failures = Mapping[str, Sequence[str]]
"""By a row's name: the gates that it fails, and what is worse than in the expected table."""


def run(request: InspectRequest) -> int:
    """Compiles, prints, and returns 1 where a gate fails, or a row is worse than the expected table's."""
    if request.against is not None and request.predict is None:
        raise ExperimentError(["--against says how well --predict ranks: name a GPU"])
    if request.predict is not None:
        return _run_predict(request)
    archs = list(TARGETS) if request.arch is None else parse_names("--arch", request.arch, TARGETS)
    if request.diff is not None:
        return _diff(request, request.diff, archs)
    ops = open_registry(request.variants_from)
    variants = _choose_triton_variants(request, ops)
    if request.dump is not None:
        return _dump(request, request.dump, ops, variants, archs)
    rows, left = _compile(request, ops, variants, archs)
    if request.update_expected and left is None:
        _update_expected(rows, variants, archs)
    worse = _find_worse(request, rows)
    found = {row.name: [*gates.failures(row), *worse.get(row.name, [])] for row in rows}
    _show(request, rows, found)
    if left is not None:
        return end_interrupted(len(variants) * len(archs), "compilations", left)
    if failing := [name for name, mine in found.items() if mine]:
        return end_with(1, f"{len(failing)} kernels fail a gate or are worse than expected: {name_some(failing)}")
    if not any(row.status == "ok" for row in rows):
        reasons = dict.fromkeys(f"{row.name} is {row.status}: {row.reason}" for row in rows)
        return end_with(1, f"nothing was compiled: {name_some([*reasons]) or 'no point has a launch'}")
    return 0


def _run_predict(request: InspectRequest) -> int:
    given = {"--arch": request.arch, "--dump": request.dump, "--diff": request.diff}
    if beside := [name for name, value in given.items() if value]:
        raise ExperimentError(
            [f"{', '.join(beside)}: not with --predict, which says a time at each of the op's points"]
        )
    from experiments.commands import predict

    return predict.run(request)


def _choose_triton_variants(request: InspectRequest, ops: Registry) -> list[Variant]:
    """What is compiled; ExperimentError has all that keeps the request from being carried out."""
    variants = [one for one in choose_variants(ops, request.op, request.variant) if one.kind == "triton"]
    is_usual = not (request.axes or request.variants_from)
    refusals = {
        "no Triton variant among those named: there is nothing to compile": not variants,
        "--dump writes files of code: there is nothing of it that --json could print": request.dump and request.as_json,
        "--update-expected writes the built-in variants' rows at the points of every run": request.update_expected
        and not is_usual,
    }
    if problems := [problem for problem, applies in refusals.items() if applies]:
        raise ExperimentError(problems)
    return variants


def _compile(
    request: InspectRequest, ops: Registry, variants: Sequence[Variant], archs: Sequence[str], dump: Path | None = None
) -> tuple[list[CompiledKernel], list[str] | None]:
    """The rows of variants on architectures, under a progress bar; where it is interrupted, those that are there by
    then, and the names of what was left undone.
    """
    axes: Axes = parse_axes(only_contract(variants, "--axes"), request.axes) if request.axes else {}
    usual = (*POINTS, *OUTSIDE_POINTS) if request.variants_from else POINTS
    points = dict.fromkeys((*usual, *(name for one in variants for name in one.contract.inspected)))
    names = [f"{one.contract.name}.{one.name}" for one in variants]
    where = ("engine",) if axes else tuple(points)
    left = [f"{name} for {arch}" for arch in archs for name in names]
    whole: list[CompiledKernel] = []
    try:
        with progress_bar("inspect", len(left)) as update:

            def arrived(arch: str, name: str, rows: Sequence[CompiledKernel]) -> None:
                whole.extend(rows)
                left.remove(f"{name} for {arch}")
                update(advance=1, doing=f"{name} for {arch}")

            rows = compile_for(archs, names, axes=axes, ops=ops, points=where, dump=dump, on_whole=arrived)
    except CompilationError as error:
        raise ExperimentError([str(error)]) from None
    except KeyboardInterrupt:
        return whole, left
    return rows, None


def _update_expected(rows: Sequence[CompiledKernel], variants: Sequence[Variant], archs: Sequence[str]) -> None:
    """Writes the expected table: these rows, and those of built-in variants that were not compiled now."""
    path = expected.table_path(triton.__version__)
    again = {(variant.contract.name, variant.name, arch) for variant in variants for arch in archs}
    before = (row for row in expected.read(path).values() if row.op in OPS and row.variant in OPS[row.op].variants)
    kept = [row for row in rows if row.point != "fp32"]  # whose digits are what counts, not its registers
    expected.write(path, [*(row for row in before if (row.op, row.variant, row.arch) not in again), *kept])
    print(f"written: {path}", file=sys.stderr)


def _find_worse(request: InspectRequest, rows: Sequence[CompiledKernel]) -> Failures:
    """What is worse than in the expected table, which has rows at the points of every run."""
    if request.update_expected or request.axes:
        return {}
    table = expected.read(expected.table_path(triton.__version__))
    worse: dict[str, list[str]] = {row.name: [] for row in rows}  # several launches may have one name
    for row in rows:
        if (was := table.get(expected.key(row))) is not None:
            worse[row.name] += [f"{one} (expected table)" for one in _worse_than(was, row)]
    return worse


def _worse_than(before: CompiledKernel, now: CompiledKernel) -> list[str]:
    return expected.regressions(before, now) + expected.longer_loop(before, now)


def _dump(request: InspectRequest, kind: str, ops: Registry, variants: Sequence[Variant], archs: Sequence[str]) -> int:
    """Prints the kernels' texts; AMD has one kind of assembler text, whichever was asked for."""
    if kind not in DUMPS:
        raise ExperimentError([f"--dump: {kind!r} is neither ptx nor sass"])
    if request.op is None:
        raise ExperimentError(["--dump prints thousands of lines a kernel: name an op with --op"])
    with tempfile.TemporaryDirectory() as folder:
        rows, left = _compile(request, ops, variants, archs, Path(folder))
        for row in rows:
            its = "amdgcn" if row.arch.startswith("gfx") else kind
            path = Path(folder) / f"{row.op}.{row.variant}.{row.point}.{row.launch}.{row.arch}.{its}"
            print(f"// {row.name}, {its}" + (f": {row.reason}" if row.reason else ""))
            if path.exists():
                print(path.read_text())
    if left is not None:
        return end_interrupted(len(variants) * len(archs), "compilations", left)
    failed = [row.name for row in rows if row.status == "failed"]
    return end_with(1, f"{len(failed)} kernels cannot be compiled: {name_some(failed)}") if failed else 0


Rows = Mapping[expected.Key, CompiledKernel]


def _diff(request: InspectRequest, pair: tuple[str, str], archs: Sequence[str]) -> int:
    """Rows that differ between two outputs of --json, or between two variants of the op.

    Returns 1 where B is a file and worse than A, as the expected table's test has it: another variant may be so.
    """
    num_files = sum(Path(name).is_file() for name in pair)
    if num_files == 1:
        raise ExperimentError(["--diff: two files of --json, or two variants of --op; one is a file and one is not"])
    before, now = [_read_rows(Path(name)) for name in pair] if num_files else _compile_pair(request, pair, archs)
    changes = _list_changes(before, now)
    if request.as_json:
        print_json(changes)
    else:
        _print_changes(Console(), changes, pair)
    both = before.keys() & now.keys()
    worse = [now[key].name for key in both if num_files and _worse_than(before[key], now[key])]
    return end_with(1, f"{len(worse)} kernels are worse in {pair[1]}: {name_some(worse)}") if worse else 0


def _read_rows(path: Path) -> Rows:
    try:
        values = [{k: v for k, v in row.items() if k != "failures"} for row in json.loads(path.read_text())]
        rows = [CompiledKernel.of(row) for row in values]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ExperimentError([f"--diff: {path} is no output of tk inspect --json: {error}"]) from None
    return {expected.key(row): row for row in rows}


def _compile_pair(request: InspectRequest, pair: tuple[str, str], archs: Sequence[str]) -> list[Rows]:
    """The rows of two variants, by keys without a variant's name."""
    if request.op is None:
        raise ExperimentError(["--diff of two variants needs --op"])
    ops = open_registry(request.variants_from)
    variants = [one for name in pair for one in choose_variants(ops, request.op, name)]
    if others := [one.name for one in variants if one.kind != "triton"]:
        raise ExperimentError([f"--diff: {others[0]} is not a Triton variant"])
    rows, left = _compile(request, ops, variants, archs)
    if left is not None:
        raise KeyboardInterrupt  # halves cannot be compared
    return [
        {(row.op, "", row.point, row.launch, row.arch): row for row in rows if row.variant == name} for name in pair
    ]


def _list_changes(before: Rows, now: Rows) -> list[dict[str, Any]]:
    changes = []
    for key in sorted(before.keys() | now.keys()):
        changed: Mapping[str, tuple[object, object]] = {"row": (key in before, key in now)}
        if key in before and key in now:
            changed = expected.changed(before[key], now[key])
        if changed:
            changes.append({"row": (now[key] if key in now else before[key]).name, "changed": changed})
    return changes


def _print_changes(console: Console, changes: Sequence[Mapping[str, Any]], pair: tuple[str, str]) -> None:
    if not changes:
        console.print(f"No row differs between {pair[0]} and {pair[1]}.")
        return
    lines = [
        (one["row"], figure, *map(_format_value, values))
        for one in changes
        for figure, values in one["changed"].items()
    ]
    console.print(make_table(f"{len(changes)} rows differ", ["row", "figure", *pair], lines, once=1))


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{number:g}" for name, number in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _show(request: InspectRequest, rows: Sequence[CompiledKernel], found: Failures) -> None:
    if request.as_json:
        print_json([{**row.as_json(), "failures": found[row.name]} for row in rows])
    else:
        _print(Console(), rows, found)


def _print(console: Console, rows: Sequence[CompiledKernel], found: Failures) -> None:
    """Every figure of one variant or one architecture, else an overview; then what fails or is unsupported."""
    archs = list(dict.fromkeys(row.arch for row in rows))
    is_narrow = len(archs) == 1 or len({(row.op, row.variant) for row in rows}) == 1
    console.print(
        _tabulate_details(console, rows, found) if is_narrow else _tabulate_overview(console, rows, archs, found)
    )
    for row in rows:
        if found[row.name]:
            console.print(Text(f"FAIL {row.name}: {'; '.join(found[row.name])}", "red"), soft_wrap=True)
    for (name, reason), where in _group_unsupported(rows).items():
        console.print(Text(f"- {name} ({', '.join(where)}): {reason}", "yellow"), soft_wrap=True)
    failing = sum(bool(one) for one in found.values())
    compiled = sum(row.status == "ok" for row in rows)
    none = "" if compiled else ", none compiled: exit status 1, for nothing is known of what was asked"
    console.print(Text(f"{len(rows)} rows, {failing} failing{none}", "red" if failing or none else "green"))


def _group_unsupported(rows: Sequence[CompiledKernel]) -> dict[tuple[str, str], dict[str, None]]:
    """("op.variant", reason) -> the architectures."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status == "unsupported":
            found.setdefault((f"{row.op}.{row.variant}", _NUMBER.sub("", row.reason)), {})[row.arch] = None
    return found


def _tabulate_overview(
    console: Console, rows: Sequence[CompiledKernel], archs: Sequence[str], found: Failures
) -> Table:
    """A line for each kernel and point, a column for each architecture."""
    roomy = console.width >= _ROOMY
    lines: list[Sequence[str | Text]] = [
        [op, label, *(_format_registers(line.get(arch), found, roomy) for arch in archs)]
        for (op, label), line in _group_lines(rows).items()
    ]
    title = "Registers of a thread" + (" and occupancy" if roomy else "")
    caption = (
        "! fails a gate, + spills without alignment, - is unsupported. One --op and --variant, or one --arch, shows "
        "everything: occupancy, spills, instructions, access widths."
    )
    table = make_table(title, ["kernel", *archs], lines, right=archs, headed=True, caption=caption)
    for column in table.columns[1:]:
        column.min_width = 6  # "sm_100"; a long name breaks instead
    return table


def _group_lines(rows: Sequence[CompiledKernel]) -> dict[tuple[str, str], dict[str, CompiledKernel]]:
    """(op, kernel and point) -> the row for each architecture.

    An architecture that does not support a point has no kernel's name: its row stands in all of the point's lines.
    """
    ordered = _in_order(rows)
    labels: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in ordered:
        if row.kernel:
            labels.setdefault((row.op, row.variant, row.point), {})[_label(row)] = None
    lines: dict[tuple[str, str], dict[str, CompiledKernel]] = {}
    for row in ordered:
        own = [_label(row)]
        for label in own if row.kernel else labels.get((row.op, row.variant, row.point), own):
            lines.setdefault((row.op, label), {})[row.arch] = row
    return lines


def _label(row: CompiledKernel) -> str:
    """ "split_kv reduce fp8": the variant, what its kernel's name adds, and the point where it is not the engine's."""
    suffix = row.kernel.removeprefix(f"{row.op}_").removeprefix(row.variant).strip("_")
    return " ".join(filter(None, (row.variant, suffix, "" if row.point == "engine" else row.point)))


def _in_order(rows: Sequence[CompiledKernel]) -> list[CompiledKernel]:
    """Variants as they came; of each, its points, their launches, their architectures as they came."""
    variants = list(dict.fromkeys((row.op, row.variant) for row in rows))
    points = list(dict.fromkeys(row.point for row in rows))
    return sorted(rows, key=lambda row: (variants.index((row.op, row.variant)), points.index(row.point), row.launch))


def _format_registers(row: CompiledKernel | None, found: Failures, roomy: bool) -> Text:
    if row is None or row.status == "unsupported":
        return Text("" if row is None else "-", "yellow")
    mark, style = ("!", "bold red") if found[row.name] else ("+", "yellow") if row.spill_bytes else ("", "")
    if row.registers is None:
        return Text(f"failed{mark}", style)
    return Text(f"{row.registers}" + (f" {row.occupancy or 0:.0%}" if roomy else "") + mark, style)


_NUMBERS = ("regs", "spill", "KB", "occ.", "16 B", "waves", "ms")
_FIGURES = ("regs", "spill", "KB", "occ.", "matrix", "16 B", "grid", "waves", "ms")
_ROOMY_FIGURES = (*_FIGURES, "early")
_CAPTION = (
    "Of a thread: registers (and the most that its config allows), bytes spilled. KB: of shared memory, a block. occ.: "
    "resident warps over the most there can be. 16 B: share of the main loop's bytes in 16-byte accesses. ms: to "
    "compile."
)
_ROOMY_CAPTION = (
    f"{_CAPTION} early: it waits for the launches ahead of it, so that it may begin before they end; +2: it asks for "
    "weights by two instructions first."
)


def _tabulate_details(console: Console, rows: Sequence[CompiledKernel], found: Failures) -> Table:
    """Every figure there is room for. What all rows have in common, an op or an architecture, is said once, above."""
    ops, archs = {row.op for row in rows}, {row.arch for row in rows}
    shared = [*(ops if len(ops) == 1 else ()), *(archs if len(archs) == 1 else ())]
    num_names = 1 if len(archs) == 1 else 2
    roomy = console.width >= _ROOMY
    figures = _ROOMY_FIGURES if roomy else _FIGURES
    lines: list[list[str | Text]] = []
    for row in _in_order(rows):
        kernel = _label(row) if len(ops) == 1 else f"{row.op}.{_label(row)}"
        *names, marked = [kernel, row.arch][:num_names]
        lines.append(
            [*names, Text(marked, "bold red" if found[row.name] else ""), *_format_figures(row)[: len(figures)]]
        )
    columns = [*["kernel", "arch"][:num_names], *figures]
    caption = _ROOMY_CAPTION if roomy else _CAPTION
    table = make_table(", ".join(shared), columns, lines, right=_NUMBERS, once=1, caption=caption)
    for column in table.columns[1:]:
        column.no_wrap = True  # a long name breaks instead
    return table


def _format_figures(row: CompiledKernel) -> list[str | Text]:
    if row.registers is None:
        status = Text(row.status, "yellow" if row.status == "unsupported" else "bold red")
        return [status if name == "matrix" else "-" for name in _ROOMY_FIGURES]
    return [
        f"{row.registers}" + (f"/{row.config['maxnreg']}" if row.config.get("maxnreg") else ""),
        Text(str(row.spill_bytes), "red" if row.spill_bytes else ""),
        f"{(row.shared_bytes or 0) / 1024:.1f}",
        f"{row.occupancy:.0%}",
        _format_value(row.matrix_instructions),
        Text(_format_width(row), "red" if row.narrow else ""),
        "x".join(map(str, row.grid)),
        "-" if row.waves is None else f"{row.waves:.1f}",
        f"{1000 * (row.compile_s or 0):.0f}",
        _format_early(row),
    ]


def _format_early(row: CompiledKernel) -> str:
    prefetches = row.early_launch.get("prefetches")
    return f"waits+{prefetches}" if prefetches else "waits" if row.early_launch else "-"


def _format_width(row: CompiledKernel) -> str:
    wide = row.access_bytes.get("16", 0) + row.access_bytes.get("32", 0)
    return "bulk" if row.bulk_copies else f"{wide:.0%}" if row.access_bytes else "-"
