"""A report before it is written: the question, the verdict, and every table and picture with its words."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.document import ExperimentError
from experiments.reporting.arms import merged, processes
from experiments.reporting.breakdown import breakdown_picture, not_recorded, step_table, steps_of
from experiments.reporting.comparison_tables import sentence, verdict_table
from experiments.reporting.curves import engine_curves, kernel_curves
from experiments.reporting.dots import throughput_picture, variant_pictures, waiting_pictures
from experiments.reporting.numerics import check_table, parity_table
from experiments.reporting.pictures import Picture
from experiments.reporting.quantization import quantization_picture
from experiments.reporting.question import Question, question_of
from experiments.reporting.resources import resources_of
from experiments.reporting.roofline import roofline_pictures
from experiments.reporting.table_style import PlainTable
from experiments.reporting.tables import Reason, reasons, tables_of
from experiments.reporting.verdict import Verdict, verdict_of
from experiments.runs.comparison import MIN_REPLICATES
from experiments.runs.reading import SOURCE, RecordedRun
from experiments.runs.rows import Row, Stage
from experiments.runs.table import Entry, long_table
from experiments.runs.verdicts import Comparison, compare_arms


@dataclass(frozen=True)
class Section:
    """name: what links to it. notes: paragraphs before its pictures and tables, such as why there are none."""

    name: str
    title: str
    notes: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[PlainTable, ...] = ()


@dataclass(frozen=True)
class Report:
    """facts: what every figure depends on. texts: prompts, each with what the first arm made of it. commands: how to
    do it again, each with what it does. repairs: what of the folder was half written. table: every figure of every
    process.
    """

    name: str
    run_id: str
    when: str
    question: Question
    verdict: Verdict
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    failures: tuple[Reason, ...]
    texts: tuple[tuple[str, str], ...]
    commands: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    source: str
    repairs: tuple[str, ...]
    table: tuple[Entry, ...]

    @property
    def pictures(self) -> list[Picture]:
        return [picture for section in self.sections for picture in section.pictures]


def report_of(run: RecordedRun) -> Report:
    """The report on a recorded run; whatever was not measured is said to be so."""
    rows = merged(run.rows)
    count = processes(run.rows)
    source = _source(run.path)
    name = str(run.resolved.get("name", run.name))
    tables = tables_of(run.rows)
    judged = _judged(run, count)
    sections = (
        _end_to_end(run, rows, tables, count),
        _differences(judged),
        _kernels(run, rows, tables, count),
        _step_time(run, rows, tables),
        _quantization(run, rows, tables),
        _numerics(rows),
        _compiled(run),
    )
    return Report(
        name=name,
        run_id=str(run.meta["run_id"]),
        when=_moment(run.meta["created"]),
        question=question_of(source, name),
        verdict=verdict_of(rows, count, run.finished, judged, run.environment),
        facts=_facts(run, rows, count),
        sections=tuple(one for one in sections if one is not None),
        failures=tuple(reasons(run.rows)),
        texts=_texts(run, rows),
        commands=_commands(run),
        environment=_flat(run.environment),
        source=source,
        repairs=run.repairs,
        table=tuple(long_table(run.rows)),
    )


def _of(rows: Sequence[Row], stage: Stage) -> list[Row]:
    return [row for row in rows if row.stage == stage]


def _source(folder: Path) -> str:
    try:
        return (folder / SOURCE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _about(run: RecordedRun, timer: str, count: int, each: str) -> str:
    """Device, timer and spread, in a sentence."""
    spread = f"{count} processes" if count > 1 else f"{each}, one process each"
    return f"{_device(run)}; {timer}; spread: quartiles of {spread}."


def _device(run: RecordedRun) -> str:
    device, host = run.environment.get("device") or {}, run.environment.get("host") or {}
    name = str(device.get("name") or "an unknown device")
    threads = host.get("torch_threads")
    if device.get("type") != "cpu" or not threads:
        return name
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}"


def _end_to_end(run: RecordedRun, rows: Sequence[Row], tables: Mapping[str, PlainTable], count: int) -> Section | None:
    engines, peers = _of(rows, "engine"), _of(rows, "peers")
    if not engines and not peers:
        return None
    rounds = max((len(row.seconds or ()) for row in engines if row.status == "ok"), default=0)
    about = _about(run, "wall clock", count, f"{rounds} rounds")
    waits = f"{_device(run)}; wall clock; percentiles over the requests of all rounds"
    waits += f", the medians of {count} processes' own." if count > 1 else ", one process each."
    everyone = [*engines, *peers]
    curves = engine_curves(engines, about, waits)
    # Dots show whatever some curve lacks, beside the others; peers are on none.
    on_curves = [metric for metric, found in curves.items() if found.complete and not peers]
    beside = None if "tokens_per_s" in on_curves else throughput_picture(everyone, about)
    drawn = [picture for found in curves.values() for picture in found.pictures]
    pictures = [beside, *drawn, *waiting_pictures(everyone, waits, on_curves)]
    shown = [name for name in tables if name not in ("kernels", "quantization", "steps")]
    notes = []
    if engines and not any(row.tokens_per_s for row in engines):
        why = next((row.speed_reason or row.reason for row in engines), None)
        notes.append(f"No arm's speed was measured: {why}.")
    return Section(
        "end-to-end", "End to end", tuple(notes), tuple(one for one in pictures if one is not None),
        tuple(tables[name] for name in shown),
    )  # fmt: skip


def _judged(run: RecordedRun, count: int) -> Comparison | None:
    """The run's arms beside each other; None where there are none, or too few processes to tell anything."""
    if count < MIN_REPLICATES:
        return None
    try:
        return compare_arms(run)
    except ExperimentError:  # no two arms have a figure of time in common
        return None


def _differences(judged: Comparison | None) -> Section | None:
    if judged is None:
        return None
    table = replace(verdict_table(judged), title="Arms beside the first of their place")
    return Section("differences", "Which differences are real", (f"{sentence(judged)}.",), (), (table,))


def _kernels(run: RecordedRun, rows: Sequence[Row], tables: Mapping[str, PlainTable], count: int) -> Section | None:
    kernels = _of(rows, "kernels")
    if "kernels" not in tables and not kernels:
        return None
    timers = list(dict.fromkeys(str(row.timer) for row in kernels if row.status == "ok" and row.timer))
    samples = max((len(row.samples_us or ()) for row in kernels if row.status == "ok"), default=0)
    about = _about(run, f"timer: {', '.join(timers) or 'none'}", count, f"{samples} samples")
    device = str((run.environment.get("device") or {}).get("name"))
    curves = kernel_curves(kernels, run.resolved.get("shapes") or {}, about)
    on_curves = [op for op, found in curves.items() if found.complete]
    drawn = [picture for found in curves.values() for picture in found.pictures]
    pictures = [*roofline_pictures(kernels, device, about), *drawn, *variant_pictures(kernels, on_curves, about)]
    notes = []
    if not timers:
        why = next((row.speed_reason or row.reason for row in kernels), "no variant passed its check")
        notes.append(f"No kernel's time was measured: {why}.")
    table = (tables["kernels"],) if "kernels" in tables else ()
    return Section("kernels", "Kernels alone", tuple(notes), tuple(pictures), table)


def _step_time(run: RecordedRun, rows: Sequence[Row], tables: Mapping[str, PlainTable]) -> Section | None:
    engines, steps = _of(rows, "engine"), _of(rows, "step")
    if not engines:
        return None
    found = steps_of(steps, engines)
    if not found:
        why = not_recorded(steps)
        return Section("step-time", "Step time", (f"Where a step's time goes: {why}.",))
    picture = breakdown_picture(found, f"{_device(run)}; {found[0].clock} clock; the mean over a round's steps.")
    summary = (tables["steps"],) if "steps" in tables else ()
    return Section("step-time", "Step time", (), (picture,) if picture else (), (*summary, step_table(found)))


def _quantization(run: RecordedRun, rows: Sequence[Row], tables: Mapping[str, PlainTable]) -> Section | None:
    if "quantization" not in tables:
        return None
    picture = quantization_picture(_of(rows, "quantization"), _device(run))
    return Section("quantization", "Quantization", (), (picture,) if picture else (), (tables["quantization"],))


def _numerics(rows: Sequence[Row]) -> Section | None:
    checks, parities, engines = _of(rows, "check"), _of(rows, "parity"), _of(rows, "engine")
    tables = [
        *([check_table(checks)] if checks else []), *([parity_table(parities, engines)] if parities else [])
    ]  # fmt: skip
    notes: tuple[str, ...] = ()
    if engines and not parities:
        notes = ("Parity of arms: nothing to compare, for only one answered.",)
    return Section("numerics", "Checks and parity", notes, (), tuple(tables)) if tables else None


def _compiled(run: RecordedRun) -> Section:
    table, notes = resources_of(run.environment)
    return Section("compiled", "What the kernels compile to", tuple(notes), (), (table,) if table else ())


def _facts(run: RecordedRun, rows: Sequence[Row], count: int) -> tuple[tuple[str, str], ...]:
    environment = run.environment
    versions, git = environment.get("versions") or {}, environment.get("git") or {}
    commit = str(git.get("commit") or git.get("reason") or "unknown")[:12]
    ended = run.meta.get("finished")
    facts = {
        "Device": _device(run),
        "Kernels": str((environment.get("device") or {}).get("triton") or "unknown"),
        "Dtype": ", ".join(dict.fromkeys(row.dtype for row in rows)) or "none",
        "Processes": str(count),
        "Software": ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton") if versions.get(name)),
        "Code": commit + (", with changes" if git.get("dirty") else ""),
        "Took": _duration(run.meta["created"], ended) if ended else "cut off",
        "Rows": f"{len(run.rows):,}",
    }
    return tuple((label, value) for label, value in facts.items() if value)


def _moment(iso: object) -> str:
    """ "21 November 2026, 16:09 UTC" for people; what is no moment stays as it is."""
    try:
        moment = datetime.fromisoformat(str(iso))
    except ValueError:
        return str(iso)
    zone = f" {moment.tzname()}" if moment.tzname() else ""
    return f"{moment.day} {moment:%B %Y, %H:%M}{zone}"


def _duration(start: object, end: object) -> str:
    try:
        seconds = (datetime.fromisoformat(str(end)) - datetime.fromisoformat(str(start))).total_seconds()
    except (ValueError, TypeError):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


def _texts(run: RecordedRun, rows: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Prompts of the workloads, each with what the first arm that answered made of it."""
    found = []
    workloads = run.resolved.get("workload") or []
    for workload in workloads if isinstance(workloads, list) else [workloads]:
        prompts = workload.get("prompts") if isinstance(workload, Mapping) else None
        served = [row for row in _of(rows, "engine") if row.status == "ok"]
        answers = [row for row in served if row.workload == workload.get("name", "")]
        if prompts and answers and answers[0].texts:
            found += list(zip(map(str, prompts), answers[0].texts, strict=False))
    return tuple(found)


def _commands(run: RecordedRun) -> tuple[tuple[str, str], ...]:
    path, here = run.path.resolve(), Path.cwd()
    # A name alone leads nowhere from where the reader of a report stands.
    folder = shlex.quote(str(path.relative_to(here) if here in path.parents else path))
    git = run.environment.get("git") or {}
    commands = [("Run it again, and hear what changed", f"tk repeat {folder}")]
    if commit := git.get("commit"):
        changes = "; it had changes besides, which environment.json keeps" if git.get("dirty") else ""
        commands.append((f"The code as it was{changes}", f"git checkout {shlex.quote(str(commit))}"))
    commands += [
        ("The experiment as it was resolved, without this folder's other files", f"tk run {folder}/resolved.yaml"),
        ("Beside another run", f"tk compare {folder} OTHER"),
        ("This report again, or its figures", f"tk report {folder} --format html"),
    ]
    return tuple(commands)


def _flat(values: Mapping[str, Any], prefix: str = "") -> tuple[tuple[str, str], ...]:
    """Nested values as "versions.torch" -> "2.13"; what is long is left to environment.json."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            if value not in (None, [], ""):
                found.append((f"{prefix}{name}", text if len(text) <= 200 else f"{text[:200]} …"))
    return tuple(found)
