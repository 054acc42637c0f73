"""A run's folder, read back: its rows, and what it says about how they came to be. Needs no torch."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from experiments.document import ExperimentError
from experiments.runs.rows import ROW, VERSION, Row
from experiments.runs.version_1 import from_version_1
from tsched.torch_free import suggest_name

SCHEMA = 1
"""Of the folder: which files there are, and what they hold. A reader refuses a newer one."""

SOURCE = "experiment.yaml"
"""The experiment as it was written, comments and all."""

META_KEYS = ("run_id", "name", "created", "finished", "resolved_sha256", "tasks", "executor")
"""What run.json has besides "schema". finished: when, or null where the run was cut off and can be resumed."""

ENVIRONMENT_PARTS = ("device", "host", "versions", "git")
"""Of environment.json, what is an object of facts where it is there."""


def workload_key(name: str) -> str:
    """What environment.json calls a workload, beside other things that have a seed or a file."""
    return f"workload {name}".strip()


@dataclass(frozen=True)
class RecordedRun:
    """A folder's contents. meta: run.json. environment: environment.json. resolved: resolved.yaml.

    rows: results.jsonl, in order, without the rows of a task whose write was cut off. repairs: a sentence for whatever
    was not as the run left it, or was left half done. lost_rows: whether there were rows that are not in `rows`.
    """

    path: Path
    meta: Mapping[str, Any]
    environment: Mapping[str, Any]
    resolved: Mapping[str, Any]
    rows: tuple[Row, ...]
    repairs: tuple[str, ...]
    lost_rows: bool = False

    @property
    def rows_version(self) -> int:
        """Of the rows as they lie in the folder; `rows` are of the newest."""
        return version_of(self.meta)

    @property
    def name(self) -> str:
        """What messages call it: the folder's name, which two runs of one experiment do not share."""
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        return self.meta["finished"] is not None

    @property
    def progress(self) -> str:
        """ "2 of 5 tasks"."""
        tasks = self.meta["tasks"]
        expected = len(tasks) if isinstance(tasks, Mapping) else tasks
        return f"{len({row.task for row in self.rows if row.task})} of {expected} tasks"


def read_run(path: Path) -> RecordedRun:
    """Reads the run in the folder `path`; a half-written end of results.jsonl is left out, and said.

    Raises:
        ExperimentError: it is no run's folder, of a newer schema, or damaged; names the file and the line.
    """
    meta = read_meta(path)
    text = _read(path / "resolved.yaml")
    repairs = []
    if hashlib.sha256(text).hexdigest() != meta["resolved_sha256"]:
        repairs.append(f"{path / 'resolved.yaml'}: changed since the run: its hash is not the one in run.json")
    try:
        resolved = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ExperimentError([f"{path / 'resolved.yaml'}: not YAML: {error}"]) from None
    if not isinstance(resolved, dict):
        raise ExperimentError([f"{path / 'resolved.yaml'}: must be a mapping of keys to values"])
    environment = read_object(path / "environment.json")
    if odd_parts := [part for part in ENVIRONMENT_PARTS if not isinstance(environment.get(part, {}), dict)]:
        raise ExperimentError([f"{path / 'environment.json'}: {', '.join(odd_parts)}: must be an object"])
    file, ended = path / "results.jsonl", meta["finished"] is not None
    rows, odd, lost = _rows(file, version_of(meta), must_exist=ended)
    done, tasks = len({row.task for row in rows}), meta["tasks"]
    if ended and not lost and isinstance(tasks, int) and done < tasks:
        odd.append(f"{file}: has the rows of {done} of the {tasks} tasks that the run ended with")
        lost = True
    return RecordedRun(path, meta, environment, resolved, rows, (*repairs, *odd), lost)


def read_meta(path: Path) -> Mapping[str, Any]:
    """run.json of the folder `path`, all its keys there; raises ExperimentError as `read_run` does."""
    if not path.is_dir():
        what = "is a file; a run is a folder" if path.exists() else f"no such folder{_neighbour(path)}"
        raise ExperimentError([f"{path}: {what}"])
    file = path / "run.json"
    if not file.exists():
        found = "its results.jsonl is from before there was one" if (path / "results.jsonl").exists() else "not a run"
        raise ExperimentError([f"{path}: not a run of schema {SCHEMA}: there is no run.json ({found})"])
    meta = read_object(file)
    schema = meta.get("schema")
    if type(schema) is not int or schema < 1:
        raise ExperimentError([f'{file}: "schema" must be a number from 1, got {schema!r}'])
    if schema > SCHEMA:
        message = f"written by a newer tkernels, in schema {schema}; this one reads schema {SCHEMA}"
        raise ExperimentError([f"{path}: {message}"])
    version = meta.get("rows_version", 1)
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ExperimentError([f'{file}: "rows_version" must be a number from 1 to {VERSION}, got {version!r}'])
    missing = [key for key in META_KEYS if key not in meta]
    if missing:
        raise ExperimentError([f"{file}: lacks {', '.join(map(repr, missing))}"])
    return meta


def version_of(meta: Mapping[str, Any]) -> int:
    """Of a run's rows; run.json did not name the first."""
    return int(meta.get("rows_version", 1))


def check_version(path: Path, meta: Mapping[str, Any], what: str) -> None:
    """Raises ExperimentError where the run's rows are of an older version; what: that is not done with them."""
    if (version := version_of(meta)) != VERSION:
        reads = "tk report, tk compare and tk runs read it"
        raise ExperimentError([f"{path}: cannot be {what}: its rows are of version {version}, not {VERSION}; {reads}"])


def _neighbour(path: Path) -> str:
    beside = path.parent if path.parent.is_dir() else None
    return suggest_name(path.name, [folder.name for folder in beside.iterdir() if folder.is_dir()]) if beside else ""


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise ExperimentError([f"{file}: missing; a run of schema {SCHEMA} has it"]) from None
    except OSError as error:
        raise ExperimentError([f"{file}: cannot be read: {error.strerror}"]) from None


def read_object(file: Path) -> Mapping[str, Any]:
    """A JSON object of a run's folder; raises ExperimentError as `read_run` does."""
    text = _read(file)
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ExperimentError([f"{file}: not JSON: {error}"]) from None
    if not isinstance(data, dict):
        raise ExperimentError([f"{file}: must be an object, got {type(data).__name__}"])
    return data


def _rows(file: Path, version: int, *, must_exist: bool) -> tuple[tuple[Row, ...], list[str], bool]:  # noqa: C901  each fault of a line in turn
    """The rows of whole tasks, a sentence for each thing that is not as it was written, and whether any is left out."""
    if not file.exists() and not must_exist:
        return (), [], False  # cut off before its first row
    lines = _read(file).split(b"\n")
    ends_whole = not lines[-1]
    lines = lines[:-1] if ends_whole else lines
    rows: list[Row] = []
    repairs: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
        except ValueError as error:
            # Only the end of a file is ever half written: a torn line in its middle is damage of another kind.
            if number == len(lines):
                repairs.append(f"{file}: line {number}, the last, is half written ({len(line)} bytes): left out")
                continue
            raise ExperimentError([f"{file}: line {number} is no row: Invalid JSON: {error}"]) from None
        try:
            rows.append(ROW.validate_python(from_version_1(data) if version == 1 else data))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            message = f"line {number} is no row: {place}{': ' if place else ''}{first['msg']}"
            raise ExperimentError([f"{file}: {message}"]) from None
        except (TypeError, ValueError) as error:
            raise ExperimentError([f"{file}: line {number} is no row of version {version}: {error}"]) from None
    lost = bool(repairs)
    if not ends_whole and not lost:
        repairs.append(f"{file}: line {len(lines)}, the last, is a whole row without its line's end: kept")
    written = Counter(row.task for row in rows)
    wanted = {row.task: row.task_rows for row in rows if row.task}
    for task, count in wanted.items():
        if written[task] > count:
            raise ExperimentError([f"{file}: task {task!r} has {written[task]} rows, and says that it wrote {count}"])
        if written[task] < count:
            repairs.append(f"{file}: task {task!r} has {written[task]} of its {count} rows: they are left out")
            lost = True
    whole = tuple(row for row in rows if not row.task or written[row.task] == wanted[row.task])
    return whole, repairs, lost
