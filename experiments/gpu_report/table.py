"""The report as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.gpu_report.engine_marks import EngineMark, Figure, engine_figures
from experiments.gpu_report.figures import CASES, MarkRow, mark_rows
from experiments.gpu_report.marks import Against
from experiments.runs.rows import Row

NOT_MEASURED = "not measured"


def report(rows: Sequence[Row], environment: Mapping[str, Any]) -> str:
    """The whole report: the device, the marks, the engine, the checks, and what was not done."""
    marks, engine = mark_rows(rows), engine_figures(rows)
    sections: dict[str, Iterable[str]] = {
        "# GPU report": _device(rows, environment),
        "## Marks": [
            marks_table(marks),
            *_list(f"{_name(one)}: {one.verdict}: {one.note}" for one in marks if one.note),
        ],
        "## Engine marks": [engine_marks_table(engine)],
        "## Engine": [_forward_table(rows)],
        "## Checks on hardware": [_hardware_table(rows)],
    }
    undone = [row for row in rows if row.stage == "report" and row.status == "failed"]
    if undone:
        sections["## Not done"] = _list(f"{row.task}: {row.reason}" for row in undone)
    return "\n\n".join(part for title, parts in sections.items() for part in (title, *parts)) + "\n"


def marks_table(rows: Sequence[MarkRow]) -> str:
    """The marks' table; a cell without a run says "not measured"."""
    columns = ("figure", "mark", "reached", "us (IQR)", "of roofline", "peer", "ratio", "verdict")
    return _table(columns, map(_mark_cells, rows))


def engine_marks_table(figures: Mapping[EngineMark, Figure]) -> str:
    """The engine marks' table, with the command that measures each, and what there is to say of some."""
    cells = [
        [mark.figure, mark.mark, figure.text or NOT_MEASURED, figure.verdict, f"`{mark.command}`"]
        for mark, figure in figures.items()
    ]
    notes = _list(f"{mark.figure}: {figure.note}" for mark, figure in figures.items() if figure.note)
    return "\n\n".join([_table(("figure", "mark", "reached", "verdict", "command"), cells), *notes])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _list(lines: Iterable[str]) -> list[str]:
    """The lines as one part of the report; none where there are none."""
    text = "\n".join(f"- {line}" for line in lines)
    return [text] if text else []


def _or_not_measured(value: float | None, form: str) -> str:
    return NOT_MEASURED if value is None else format(value, form)


def _name(row: MarkRow) -> str:
    return f"{row.mark.op} {row.mark.point}"


_FORMS: Mapping[Against, tuple[str, str]] = {"peer": (".2f", "x"), "time": (",.1f", " us")}
"""How a figure is written, and its unit; the others are shares."""


def _mark_cells(row: MarkRow) -> list[str]:
    ours, peer = row.ours, row.peer
    form, unit = _FORMS.get(row.mark.against, (".0%", ""))
    reached = _or_not_measured(row.reached, form)
    if row.reached is not None:
        reached += unit
    return [
        _name(row),
        row.mark.text,
        reached,
        NOT_MEASURED if ours is None else f"{ours.median_us:,.1f} ({ours.iqr_us or 0:.2g}), {ours.variant}",
        _or_not_measured(ours.roofline_fraction if ours is not None else None, ".0%"),
        NOT_MEASURED if peer is None else f"{peer.variant} {peer.median_us:,.1f}",
        _or_not_measured(row.ratio, ".2f"),
        row.verdict,
    ]


def _device(rows: Sequence[Row], environment: Mapping[str, Any]) -> Iterator[str]:
    device = environment.get("device")
    if device is None:
        yield "No GPU has run this yet."
        return
    versions = ", ".join(f"{name} {value}" for name, value in environment["versions"].items() if value)
    yield (
        f"{device['name']}, {device['arch']}, {device['multiprocessors']} multiprocessors; cuda {device['cuda']}, "
        f"{versions}."
    )
    for row in rows:
        if row.stage == "rates":
            copy, read, matmul = row.copy_bytes_per_s or 0, row.read_bytes_per_s or 0, row.matmul_flops_per_s or 0
            yield (
                f"Measured: copy {copy / 1e12:.2f} TB/s (read and written), read {read / 1e12:.2f} TB/s, "
                f"bf16 matmul {matmul / 1e12:.0f} TFLOP/s."
            )


def _forward_table(rows: Sequence[Row]) -> str:
    """A line for each step of each model: ours, launched and from a graph, beside transformers'."""
    works: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.stage == "forward":
            how = row.peer or ("graph" if row.settings["cuda_graphs"] else "eager")
            works.setdefault((row.settings["model"], str(row.workload)), {})[how] = row
    if not works:
        return f"Prefill and decode beside transformers: {NOT_MEASURED}."
    columns = ("model", "work", "eager us", "CUDA graph us", "transformers us", "ratio")
    return _table(columns, ([*work, *_forward_cells(ways)] for work, ways in works.items()))


def _forward_cells(ways: Mapping[str, Row]) -> Iterator[str]:
    times = {how: row.median_us for how, row in ways.items() if row.median_us is not None}
    for how in ("eager", "graph", "transformers"):
        why = f" ({(ways[how].reason or '')[:120]})" if how in ways and how not in times else ""
        yield f"{times[how]:,.0f}" if how in times else NOT_MEASURED + why
    theirs = times.pop("transformers", None)
    yield _or_not_measured(theirs / min(times.values()) if theirs and times else None, ".2f")


def _hardware_table(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        if row.stage != "hardware":
            continue
        verdict = (row.reason or "ok").splitlines()[0]
        if row.status == "unsupported":
            verdict = f"not run: {verdict}"
        test = f"{row.test}, {row.point}" if row.test in CASES else str(row.test)
        runs = f"{row.runs_right} of {row.runs}" if row.runs_right is not None else str(row.runs or 0)
        cells.append([f"{row.op}.{row.variant}", test, runs, verdict])
    return _table(("variant", "check", "runs", "verdict"), cells) if cells else f"{NOT_MEASURED}."
