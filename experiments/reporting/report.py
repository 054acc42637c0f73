"""A report before it is written: the question, the verdict, and every table and picture with its words."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.document import ExperimentError
from experiments.reporting.arms import count_processes, merge_processes
from experiments.reporting.comparison_tables import count_outcomes, verdict_table
from experiments.reporting.dots import pictures_of
from experiments.reporting.measured import engine_plots, kernel_plots
from experiments.reporting.pictures import Picture
from experiments.reporting.quantization import quantization_picture
from experiments.reporting.question import Question, question_of
from experiments.reporting.resources import resources_of
from experiments.reporting.roofline import roofline_pictures
from experiments.reporting.steps import ranges_table, steps_of, steps_picture
from experiments.reporting.table_style import PlainTable, group_by
from experiments.reporting.tables import Reason, check_table, continued_prompts, list_reasons, parity_table, tables_of
from experiments.reporting.verdict import Verdict, verdict_of
from experiments.runs.comparison import MIN_REPLICATES
from experiments.runs.reading import SOURCE, RecordedRun
from experiments.runs.rows import Row
from experiments.runs.table import Entry, long_table
from experiments.runs.verdicts import Comparison, compare_arms


@dataclass(frozen=True)
class Section:
    """name: what links to it. notes: paragraphs before its pictures and tables, such as why there are none."""

    name: str
    title: str
    notes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    tables: Sequence[PlainTable] = ()


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
    facts: Mapping[str, str]
    sections: tuple[Section, ...]
    failures: tuple[Reason, ...]
    texts: tuple[tuple[str, str], ...]
    commands: Mapping[str, str]
    environment: Mapping[str, str]
    source: str
    repairs: tuple[str, ...]
    table: tuple[Entry, ...]

    @property
    def pictures(self) -> list[Picture]:
        return [picture for section in self.sections for picture in section.pictures]


class _Findings:
    """What a run found, as the sections share it. rows: merged, by their stage. count: processes of each thing."""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self.merged = merge_processes(run.rows)
        self.rows: Mapping[str, list[Row]] = group_by(self.merged, lambda row: str(row.stage))
        self.count = count_processes(run.rows)
        self.tables = tables_of(run.rows)
        device, host = run.environment.get("device", {}), run.environment.get("host", {})
        threads = host.get("torch_threads") if device.get("type") == "cpu" else None
        self.rates: Mapping[str, float] | None = run.environment.get("rates")
        self.device_name = str(device.get("name") or "an unknown device")
        self.device = self.device_name + (f", {threads} thread{'s' if threads != 1 else ''}" if threads else "")

    def of(self, stage: str) -> Sequence[Row]:
        return self.rows.get(stage, ())

    def named(self, *names: str) -> list[PlainTable]:
        """Of the tables those that there are."""
        return [self.tables[name] for name in names if name in self.tables]

    def about(self, timer: str, each: str) -> str:
        """Device, timer and spread, in a sentence."""
        spread = f"{self.count} processes" if self.count > 1 else f"{each}, one process each"
        return f"{self.device}; {timer}; spread: quartiles of {spread}."


def report_of(run: RecordedRun) -> Report:
    """The report on a recorded run; whatever was not measured is said to be so."""
    found = _Findings(run)
    try:
        source = (run.path / SOURCE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        source = ""
    name = str(run.resolved.get("name", run.name))
    judged = _judge(run, found.count)
    sections = (
        _end_to_end(found), _differences(judged), _kernels(found), _step_time(found), _quantization(found),
        _numerics(found), _compiled(run),
    )  # fmt: skip
    return Report(
        name=name,
        run_id=str(run.meta["run_id"]),
        when=_format_moment(run.meta["created"]),
        question=question_of(source, name),
        verdict=verdict_of(found.merged, found.count, run.finished, judged, run.environment),
        facts=_facts(found),
        sections=tuple(one for one in sections if one is not None),
        failures=tuple(list_reasons(run.rows)),
        texts=_texts(run),
        commands=_commands(run),
        environment=_flatten(run.environment),
        source=source,
        repairs=run.repairs,
        table=tuple(long_table(run.rows)),
    )


def _judge(run: RecordedRun, count: int) -> Comparison | None:
    """The run's arms beside each other; None where there are none, or too few processes to tell anything."""
    if count < MIN_REPLICATES:
        return None
    try:
        return compare_arms(run)
    except ExperimentError:  # no two arms have a figure of time in common
        return None


def _end_to_end(found: _Findings) -> Section | None:
    engines, others = found.of("engine"), [*found.of("peers"), *found.of("http")]
    if not engines and not others:
        return None
    about = found.about("wall clock", f"{_most_samples([*engines, *others], 'seconds')} rounds")
    waits = f"{found.device}; wall clock; percentiles over the requests of all rounds"
    waits += f", the medians of {found.count} processes' own." if found.count > 1 else ", one process each."
    notes = []
    if engines and not any(row.tokens_per_s for row in engines):
        notes.append(f"No arm's speed was measured: {_why_untimed(engines)}.")
    pictures = pictures_of(engine_plots([*engines, *others], about, waits))
    tables = found.named("engine", "modelled arms", "http", "waiting", "memory", "peers", "effects")
    return Section("end-to-end", "End to end", notes, pictures, tables)


def _most_samples(rows: Sequence[Row], column: str) -> int:
    return max((len(getattr(row, column) or ()) for row in rows if row.status == "ok"), default=0)


def _why_untimed(rows: Sequence[Row], otherwise: str = "not measured") -> str:
    return next((why for row in rows if (why := row.speed_reason or row.reason)), otherwise)


def _differences(judged: Comparison | None) -> Section | None:
    if judged is None:
        return None
    table = verdict_table(judged, "Arms beside the first of their place")
    return Section("differences", "Which differences are real", (f"{count_outcomes(judged)}.",), (), (table,))


def _kernels(found: _Findings) -> Section | None:
    kernels, tables = found.of("kernels"), found.named("kernels", "modelled kernels")
    if not tables and not kernels:
        return None
    timers = list(dict.fromkeys(row.timer for row in kernels if row.timer))
    about = found.about(f"timer: {', '.join(timers) or 'none'}", f"{_most_samples(kernels, 'samples_us')} samples")
    plots = kernel_plots(kernels, found.run.resolved.get("shapes") or {}, about)
    notes = []
    if not timers:
        notes.append(f"No kernel's time was measured: {_why_untimed(kernels, 'no variant passed its check')}.")
    pictures = [*roofline_pictures(kernels, found.device_name, about, found.rates), *pictures_of(plots)]
    return Section("kernels", "Kernels alone", notes, pictures, tables)


def _step_time(found: _Findings) -> Section | None:
    engines, rows = found.of("engine"), found.of("step")
    if not engines:
        return None
    steps = steps_of(rows, engines)
    if not steps:
        return Section("step-time", "Step time", [f"Where a step's time goes: {_why_untimed(rows)}."])
    picture = steps_picture(steps, f"{found.device}; {steps[0].clock} clock; the mean over a round's steps.")
    return Section("step-time", "Step time", (), [picture], [*found.named("steps"), ranges_table(steps)])


def _quantization(found: _Findings) -> Section | None:
    tables = found.named("quantization")
    picture = quantization_picture(found.of("quantization"), found.device)
    return Section("quantization", "Quantization", (), [picture] if picture else [], tables) if tables else None


def _numerics(found: _Findings) -> Section | None:
    checks, parities, engines = found.of("check"), found.of("parity"), found.of("engine")
    tables = [check_table(checks)] if checks else []
    tables += [parity_table(parities, engines)] if parities else []
    notes = ["Parity of arms: nothing to compare, for only one answered."] if engines and not parities else []
    return Section("numerics", "Checks and parity", notes, (), tables) if tables else None


def _compiled(run: RecordedRun) -> Section:
    table, notes = resources_of(run.environment)
    return Section("compiled", "What the kernels compile to", notes, (), [table] if table else [])


def _facts(found: _Findings) -> dict[str, str]:
    run, environment = found.run, found.run.environment
    versions, git = environment.get("versions", {}), environment.get("git", {})
    software = [f"{name} {version}" for name in ("torch", "triton") if (version := versions.get(name))]
    facts = {
        "Device": found.device,
        "Kernels": str(environment.get("device", {}).get("triton") or "unknown"),
        "Dtype": ", ".join(dict.fromkeys(row.dtype for row in found.merged)) or "none",
        "Processes": str(found.count),
        "Software": ", ".join(software),
        "Code": _describe_code(git),
        "Took": _format_duration(run.meta["created"], run.meta["finished"]) if run.finished else "cut off",
        "Rows": f"{len(run.rows):,}",
    }
    return {label: value for label, value in facts.items() if value}


def _describe_code(git: Mapping[str, Any]) -> str:
    commit = str(git.get("commit") or git.get("reason") or "unknown")[:12]
    return commit + (", with changes" if git.get("dirty") else "")


def _format_moment(iso: object) -> str:
    """ "21 November 2026, 16:09 UTC" for people; what is no moment stays as it is."""
    try:
        moment = datetime.fromisoformat(str(iso))
    except ValueError:
        return str(iso)
    return f"{moment.day} {moment:%B %Y, %H:%M %Z}".strip()


def _format_duration(start: object, end: object) -> str:
    try:
        seconds = (datetime.fromisoformat(str(end)) - datetime.fromisoformat(str(start))).total_seconds()
    except (ValueError, TypeError):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours = f"{minutes // 60} h {minutes % 60} min"
    return hours if minutes >= 60 else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _texts(run: RecordedRun) -> tuple[tuple[str, str], ...]:
    """Prompts of the workloads, each with what the first arm that answered made of it."""
    workloads = run.resolved.get("workload") or []
    each = [one for one in (workloads if isinstance(workloads, list) else [workloads]) if isinstance(one, Mapping)]
    prompts = {one.get("name", ""): [*map(str, one.get("prompts") or ())] for one in each}
    return tuple(continued_prompts(prompts, run.rows))


def _commands(run: RecordedRun) -> dict[str, str]:
    """What is done -> the command that does it."""
    path, here = run.path.resolve(), Path.cwd()
    # A name alone leads nowhere from where the reader of a report stands.
    folder = shlex.quote(str(path.relative_to(here) if here in path.parents else path))
    git = run.environment.get("git", {})
    commands = {"Run it again, and hear what changed": f"tk repeat {folder}"}
    if commit := git.get("commit"):
        changes = "; it had changes besides, which environment.json keeps" if git.get("dirty") else ""
        commands[f"The code as it was{changes}"] = f"git checkout {shlex.quote(str(commit))}"
    return commands | {
        "The experiment as it was resolved, without this folder's other files": f"tk run {folder}/resolved.yaml",
        "Beside another run": f"tk compare {folder} OTHER",
        "This report again, or its figures": f"tk report {folder} --format html",
    }


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as "versions.torch" -> "2.13"; what is long is left to environment.json."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found[f"{prefix}{name}"] = text if len(text) <= 200 else f"{text[:200]} …"
    return found
