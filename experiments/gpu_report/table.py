"""The report as Markdown."""

from collections.abc import Iterable, Sequence

from experiments.gpu_report.engine_marks import EngineRow, engine_rows
from experiments.gpu_report.figures import Row, rows_of
from experiments.gpu_report.journal import Fact, facts
from experiments.gpu_report.marks import MARKS

NOT_MEASURED = "not measured"

_COLUMNS = ("figure", "mark", "reached", "us (IQR)", "of roofline", "peer", "ratio", "verdict")


def report(lines: Sequence[Fact]) -> str:
    """The whole report: the device, the marks, the engine, the checks, and what was not done."""
    parts = ["# GPU report", *_device(lines), "## Marks", markdown(rows_of(lines))]
    parts += [*_notes(rows_of(lines)), "## Engine marks", engine_markdown(engine_rows(lines))]
    parts += ["## Engine", _engine(lines), "## Checks on hardware", _checks(lines)]
    if undone := _undone(lines):
        parts += ["## Not done", "\n".join(f"- {line}" for line in undone)]
    return "\n\n".join(parts) + "\n"


def markdown(rows: Sequence[Row]) -> str:
    """The marks' table; a cell without a run says "not measured"."""
    return _table(_COLUMNS, [_cells(row) for row in rows])


def engine_markdown(rows: Sequence[EngineRow]) -> str:
    """The engine marks' table, with the command that measures each, and what there is to say of some."""
    cells = [[row.figure, row.mark, row.reached or NOT_MEASURED, row.verdict, f"`{row.command}`"] for row in rows]
    notes = [f"- {row.figure}: {row.note}" for row in rows if row.note]
    table = _table(("figure", "mark", "reached", "verdict", "command"), cells)
    return "\n\n".join([table, *(["\n".join(notes)] if notes else [])])


def empty_rows() -> list[Row]:
    """The table before any run."""
    return rows_of((), MARKS)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def _cells(row: Row) -> list[str]:
    us = NOT_MEASURED if row.microseconds is None else f"{row.microseconds:,.1f} ({row.iqr_us or 0:.2g}), {row.variant}"
    peer = NOT_MEASURED if row.peer_us is None else f"{row.peer} {row.peer_us:,.1f}"
    reached = NOT_MEASURED
    if row.reached is not None:
        reached = f"{row.reached:.2f}x" if "x " in row.mark else f"{row.reached:.0%}"
    ratio = NOT_MEASURED if row.ratio is None else f"{row.ratio:.2f}"
    roofline = NOT_MEASURED if row.roofline is None else f"{row.roofline:.0%}"
    return [row.figure, row.mark, reached, us, roofline, peer, ratio, row.verdict]


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [f"- {row.figure}: {row.verdict}: {row.note}" for row in rows if row.note]
    return ["\n".join(notes)] if notes else []


def _device(lines: Sequence[Fact]) -> list[str]:
    parts = []
    for fact in facts(lines):
        if fact.get("kind") == "device":
            versions = ", ".join(f"{name} {value}" for name, value in fact["versions"].items() if value)
            parts.append(f"{fact['name']}, {fact['arch']}, {fact['multiprocessors']} multiprocessors; {versions}.")
        elif fact.get("kind") == "rates":
            parts.append(
                f"Measured: copy {fact['copy_bytes_per_s'] / 1e12:.2f} TB/s (read and written), "
                f"read {fact['read_bytes_per_s'] / 1e12:.2f} TB/s, "
                f"bf16 matmul {fact['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s."
            )
    return parts or ["No GPU has run this yet."]


def _engine(lines: Sequence[Fact]) -> str:
    rows = []
    for fact in facts(lines):
        if fact.get("kind") != "engine":
            continue
        cells = [str(fact["model"]), str(fact["work"])]
        for name in ("ours_us", "ours_graph_us", "transformers_us"):
            cells.append(f"{fact[name]:,.0f}" if fact.get(name) else f"{NOT_MEASURED}{_because(fact, name)}")
        best = min((fact[name] for name in ("ours_us", "ours_graph_us") if fact.get(name)), default=None)
        other = fact.get("transformers_us")
        rows.append([*cells, f"{other / best:.2f}" if best and other else NOT_MEASURED])
    if not rows:
        return f"Prefill and decode beside transformers: {NOT_MEASURED}."
    return _table(("model", "work", "eager us", "CUDA graph us", "transformers us", "ratio"), rows)


def _because(fact: Fact, name: str) -> str:
    reason = fact.get(f"{name}_reason")
    return f" ({str(reason)[:120]})" if reason else ""


def _checks(lines: Sequence[Fact]) -> str:
    rows = []
    for fact in facts(lines):
        name = f"{fact.get('op')}.{fact.get('variant')}"
        if fact.get("kind") == "correctness":
            verdict = "ok" if fact["ok"] == fact["cases"] else f"{fact['failures'][0]}".splitlines()[0]
            rows.append([name, f"drawn cases, {fact['signature']}", f"{fact['ok']} of {fact['cases']}", verdict])
        elif fact.get("kind") in ("rerun", "stress", "sanitizer"):
            rows.append([name, str(fact["kind"]), str(fact.get("runs", "")), str(fact["verdict"])])
    return _table(("variant", "check", "runs", "verdict"), rows) if rows else f"{NOT_MEASURED}."


def _undone(lines: Sequence[Fact]) -> list[str]:
    """The last word on each step that did not end well."""
    last: dict[str, str] = {}
    for line in lines:
        if line["event"] == "end":
            last[line["step"]] = "" if line["status"] == "done" else f"{line['step']}: {line.get('reason') or 'failed'}"
        elif line["event"] == "begin":
            last[line["step"]] = f"{line['step']}: begun and not ended"
    return [text for text in last.values() if text]
