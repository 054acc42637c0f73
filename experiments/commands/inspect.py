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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from experiments.commands.check import parse_axes
from experiments.commands.registry import matching, open_registry
from experiments.commands.requests import InspectRequest
from experiments.document import ExperimentError
from experiments.reporting.table_style import add_row, new_table
from tkernels import OPS, Registry
from tkernels.contract import Value
from tkernels.device import TARGETS
from tkernels.variant import Variant
from tkernels.verification.ahead_of_time import CompilationError, compile_for
from tkernels.verification.inspection import expected, gates
from tkernels.verification.inspection.points import POINTS
from tkernels.verification.inspection.rows import CompiledKernel
from tsched.torch_free import suggest_name

DUMPS = ("ptx", "sass")
_NUMBER = re.compile(r"; this is \w+$")  # of the architecture, which the line names
_ROOMY = 110  # columns of a terminal that has room for occupancies beside registers


def run(request: InspectRequest) -> int:
    """Compiles, prints, and returns 1 where a gate fails, or a row is worse than the expected table's."""
    archs = _archs(request.arch)
    if request.diff is not None:
        return _diff(request, archs)
    ops = open_registry(request.variants_from)
    variants = [one for one in matching(ops, request.op, request.variant) if one.kind == "triton"]
    if not variants:
        raise ExperimentError(["no Triton variant among those named: there is nothing to compile"])
    if request.dump is not None and request.as_json:
        raise ExperimentError(["--dump writes files of code: there is nothing of it that --json could print"])
    if request.dump is not None:
        return _dump(request, ops, variants, archs)
    if request.update_expected and (request.axes or request.variants_from):
        raise ExperimentError(["--update-expected writes the built-in variants' rows at the points of every run"])
    rows = _compiled(request, ops, variants, archs)
    path = expected.table_path(triton.__version__)
    table = expected.read(path)
    worse: Mapping[str, list[str]] = {}
    if request.update_expected:
        kept = [row for row in table.values() if _is_built_in(row) and not _names(variants, archs, row)]
        expected.write(path, [*kept, *rows])
        print(f"written: {path}", file=sys.stderr)
    elif not request.axes:
        worse = _worse(rows, table)
    found = {row.name: [*gates.failures(row), *worse.get(row.name, [])] for row in rows}
    if request.as_json:
        json.dump([{**row.as_json(), "failures": found[row.name]} for row in rows], sys.stdout, indent=1)
        print()
    else:
        _print(rows, found)
    return 1 if any(found.values()) or not any(row.status == "ok" for row in rows) else 0


def _archs(name: str | None) -> list[str]:
    if name is None:
        return list(TARGETS)
    names = [one.strip() for one in name.split(",")]
    for one in names:
        if one not in TARGETS:
            raise ExperimentError([f"--arch: no {one!r}: there is {', '.join(TARGETS)}{suggest_name(one, TARGETS)}"])
    return names


def _is_built_in(row: CompiledKernel) -> bool:
    return row.op in OPS and row.variant in OPS[row.op].variants


def _names(variants: Sequence[Variant], archs: Sequence[str], row: CompiledKernel) -> bool:
    return row.arch in archs and any((row.op, row.variant) == (one.contract.name, one.name) for one in variants)


def _worse(rows: Sequence[CompiledKernel], table: Mapping[expected.Key, CompiledKernel]) -> dict[str, list[str]]:
    return {
        row.name: [f"{one} (expected table)" for one in found]
        for row in rows
        if expected.key(row) in table and (found := expected.regressions(table[expected.key(row)], row))
    }


def _compiled(
    request: InspectRequest, ops: Registry, variants: Sequence[Variant], archs: Sequence[str], dump: Path | None = None
) -> list[CompiledKernel]:
    """The rows of variants on architectures, under a progress bar."""
    axes: Mapping[str, Value] = {}
    if request.axes:
        if len({one.contract.name for one in variants}) != 1:
            raise ExperimentError(["--axes belong to one op: name it with --op"])
        axes = parse_axes(variants[0].contract, request.axes)
    names = [f"{one.contract.name}.{one.name}" for one in variants]
    columns = (
        TextColumn("inspect"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}", style="dim", markup=False),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(names) * len(archs), doing="")
        seen: set[tuple[str, str, str]] = set()

        def arrived(row: CompiledKernel) -> None:
            seen.add((row.op, row.variant, row.arch))
            progress.update(task, completed=len(seen), doing=row.name)

        try:
            return compile_for(
                archs,
                names,
                axes=axes,
                ops=ops,
                points=("engine",) if axes else _points(variants),
                dump=dump,
                on_row=arrived,
            )
        except CompilationError as error:
            raise ExperimentError([str(error)]) from None


def _points(variants: Sequence[Variant]) -> list[str]:
    own = (name for one in variants for name in one.contract.inspected)
    return list(dict.fromkeys((*POINTS, *own)))


def _dump(request: InspectRequest, ops: Registry, variants: Sequence[Variant], archs: Sequence[str]) -> int:
    """Prints the kernels' texts; AMD has one kind of assembler text, whichever was asked for."""
    if request.dump not in DUMPS:
        raise ExperimentError([f"--dump: {request.dump!r} is neither ptx nor sass"])
    if request.op is None:
        raise ExperimentError(["--dump prints thousands of lines a kernel: name an op with --op"])
    with tempfile.TemporaryDirectory() as folder:
        rows = _compiled(request, ops, variants, archs, Path(folder))
        for row in rows:
            kind = "amdgcn" if row.arch.startswith("gfx") else request.dump
            path = Path(folder) / f"{row.op}.{row.variant}.{row.point}.{row.launch}.{row.arch}.{kind}"
            print(f"// {row.name}, {kind}" + (f": {row.reason}" if row.reason else ""))
            if path.exists():
                print(path.read_text())
    return 1 if any(row.status == "failed" for row in rows) else 0


def _diff(request: InspectRequest, archs: Sequence[str]) -> int:
    """Rows that differ between two outputs of --json, or between two variants of the op.

    Returns 1 where B is a file and worse than A, as the expected table's test has it: another variant may be so.
    """
    assert request.diff is not None
    files = [Path(name).is_file() for name in request.diff]
    if any(files) != all(files):
        raise ExperimentError(["--diff: two files of --json, or two variants of --op; one is a file and one is not"])
    if all(files):
        before, now = (_rows_of(Path(name)) for name in request.diff)
    else:
        if request.op is None:
            raise ExperimentError(["--diff of two variants needs --op"])
        ops = open_registry(request.variants_from)
        pair = [matching(ops, request.op, name)[0] for name in request.diff]
        if strangers := [one.name for one in pair if one.kind != "triton"]:
            raise ExperimentError([f"--diff: {strangers[0]} is not a Triton variant"])
        rows = _compiled(request, ops, pair, archs)
        before, now = ({_anonymous(row): row for row in rows if row.variant == one.name} for one in pair)
    changes = [
        {"row": (now.get(key) or before[key]).name, "changed": expected.changed(before[key], now[key])}
        if key in before and key in now
        else {"row": (now.get(key) or before[key]).name, "changed": {"row": (key in before, key in now)}}
        for key in sorted(before.keys() | now.keys())
    ]
    changes = [one for one in changes if one["changed"]]
    if request.as_json:
        json.dump(changes, sys.stdout, indent=1)
        print()
    else:
        _print_changes(changes, request.diff)
    worse = all(files) and any(expected.regressions(before[key], now[key]) for key in before.keys() & now.keys())
    return 1 if worse else 0


def _rows_of(path: Path) -> dict[expected.Key, CompiledKernel]:
    try:
        values = [{k: v for k, v in row.items() if k != "failures"} for row in json.loads(path.read_text())]
        rows = [CompiledKernel.of(row) for row in values]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ExperimentError([f"--diff: {path} is no output of tk inspect --json: {error}"]) from None
    return {expected.key(row): row for row in rows}


def _anonymous(row: CompiledKernel) -> expected.Key:
    return row.op, "", row.point, row.launch, row.arch


def _print_changes(changes: Sequence[Mapping[str, Any]], pair: tuple[str, str]) -> None:
    console = Console()
    if not changes:
        console.print(f"No row differs between {pair[0]} and {pair[1]}.")
        return
    table = new_table(f"{len(changes)} rows differ", ["row", "figure", *pair])
    for one in changes:
        name = one["row"]
        for figure, (before, now) in one["changed"].items():
            add_row(table, name, figure, _brief(before), _brief(now))
            name = ""
    console.print(table)


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}:{number:g}" for name, number in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _print(rows: Sequence[CompiledKernel], found: Mapping[str, Sequence[str]]) -> None:
    console = Console()
    archs = list(dict.fromkeys(row.arch for row in rows))
    variants = {(row.op, row.variant) for row in rows}
    if len(variants) == 1 or len(archs) == 1:
        _print_details(console, rows, found)
    else:
        _print_overview(console, rows, archs, found)
    for row in rows:
        if found[row.name]:
            console.print(Text(f"FAIL {row.name}: {'; '.join(found[row.name])}", "red"), soft_wrap=True)
    unsupported: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.status == "unsupported":
            unsupported.setdefault((f"{row.op}.{row.variant}", _NUMBER.sub("", row.reason)), {})[row.arch] = None
    for (name, reason), where in unsupported.items():
        console.print(Text(f"- {name} ({', '.join(where)}): {reason}", "yellow"), soft_wrap=True)
    failing = sum(bool(one) for one in found.values())
    console.print(Text(f"{len(rows)} rows, {failing} failing", "red" if failing else "green"))


def _print_overview(
    console: Console, rows: Sequence[CompiledKernel], archs: Sequence[str], found: Mapping[str, Sequence[str]]
) -> None:
    """A line for each kernel and point, a column for each architecture."""
    roomy = console.width >= _ROOMY
    table = new_table("Registers of a thread" + (" and occupancy" if roomy else ""), ["kernel", *archs], archs)
    for column in table.columns[1:]:
        column.min_width = 6  # "sm_100"; a long name breaks instead
    lines: dict[tuple[str, str], dict[str, CompiledKernel]] = {}
    for row in _in_order(rows):
        lines.setdefault((row.op, _label(row)), {})[row.arch] = row
    # An architecture that does not support a point has no kernel's name: its mark goes to the point's lines.
    nameless = {(row.op, row.variant, row.point, row.arch) for row in rows if not row.kernel}
    last = None
    for (op, label), cells in lines.items():
        one = next((row for row in cells.values() if row.kernel), next(iter(cells.values())))
        if not one.kernel and any(row.kernel and _point(row) == _point(one) for row in rows):
            continue
        if op != last:
            add_row(table, Text(op, "bold"))
        last = op
        marked = [_cell(cells[arch], found, roomy) if arch in cells else _absent((*_point(one), arch) in nameless)
                  for arch in archs]  # fmt: skip
        add_row(table, f"  {label}", *marked)
    table.caption = (
        "! fails a gate, + spills without alignment, - is unsupported. One --op and --variant, or one --arch, shows "
        "everything: occupancy, spills, instructions, access widths."
    )
    table.caption_justify = "left"
    console.print(table)


def _label(row: CompiledKernel) -> str:
    """ "split_kv reduce fp8": the variant, what its kernel's name adds, and the point where it is not the engine's."""
    suffix = row.kernel.removeprefix(f"{row.op}_").removeprefix(row.variant).strip("_")
    return " ".join(filter(None, (row.variant, suffix, "" if row.point == "engine" else row.point)))


def _point(row: CompiledKernel) -> tuple[str, str, str]:
    return row.op, row.variant, row.point


def _in_order(rows: Sequence[CompiledKernel]) -> list[CompiledKernel]:
    """Variants as they came; of each, its points, their launches, their architectures as they came."""
    variants = list(dict.fromkeys((row.op, row.variant) for row in rows))
    points = list(dict.fromkeys(row.point for row in rows))
    return sorted(rows, key=lambda row: (variants.index((row.op, row.variant)), points.index(row.point), row.launch))


def _absent(unsupported: bool) -> Text:
    return Text("-" if unsupported else "", "yellow")


def _cell(row: CompiledKernel, found: Mapping[str, Sequence[str]], roomy: bool) -> Text:
    if row.status == "unsupported":
        return _absent(True)
    mark, style = ("!", "bold red") if found[row.name] else ("+", "yellow") if row.spill_bytes else ("", "")
    if row.registers is None:
        return Text(f"failed{mark}", style)
    return Text(f"{row.registers}" + (f" {row.occupancy or 0:.0%}" if roomy else "") + mark, style)


def _print_details(console: Console, rows: Sequence[CompiledKernel], found: Mapping[str, Sequence[str]]) -> None:
    """Every figure. What all rows have in common, an op or an architecture, is said once, above."""
    ops, archs = {row.op for row in rows}, {row.arch for row in rows}
    title = ", ".join([*(ops if len(ops) == 1 else ()), *(archs if len(archs) == 1 else ())])
    right = ["regs", "spill", "KB", "occ.", "16 B", "waves", "ms"]
    columns = ["kernel", "arch", *right[:4], "matrix", "16 B", "grid", *right[5:]]
    table = new_table(title, columns if len(archs) > 1 else [one for one in columns if one != "arch"], right)
    for column in table.columns[1:]:
        column.no_wrap = True  # a long name breaks instead
    last = ""
    for row in _in_order(rows):
        name = _label(row) if len(ops) == 1 else f"{row.op}.{_label(row)}"
        arch = [Text(row.arch, "bold red" if found[row.name] else "")] if len(archs) > 1 else []
        label = Text("" if name == last else name, "bold red" if found[row.name] and not arch else "")
        add_row(table, label, *arch, *_figures(row))
        last = name
    table.caption = (
        "Of a thread: registers, bytes spilled. KB: of shared memory, a block. occ.: resident warps over the most "
        "there can be. 16 B: share of the main loop's bytes in 16-byte accesses. ms: to compile."
    )
    table.caption_justify = "left"
    console.print(table)


def _figures(row: CompiledKernel) -> list[Text]:
    if row.registers is None:
        status = Text(row.status, "yellow" if row.status == "unsupported" else "bold red")
        return [*(Text("-") for _ in range(4)), status]
    wide = row.access_bytes.get("16", 0) + row.access_bytes.get("32", 0)
    return [
        Text(str(row.registers)),
        Text(str(row.spill_bytes), "red" if row.spill_bytes else ""),
        Text(f"{(row.shared_bytes or 0) / 1024:.1f}"),
        Text(f"{row.occupancy:.0%}"),
        Text(_brief(row.matrix_instructions)),
        Text("bulk" if row.bulk_copies else f"{wide:.0%}" if row.access_bytes else "-", "red" if row.narrow else ""),
        Text("x".join(map(str, row.grid))),
        Text("-" if row.waves is None else f"{row.waves:.1f}"),
        Text(f"{1000 * (row.compile_s or 0):.0f}"),
    ]
