"""A run's folder, read back: its rows, and what it says about how they came to be. Needs no torch."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from experiments.document import ExperimentError
from experiments.runs.rows import SCHEMA, VERSION, Row, from_version_1
from tsched.torch_free import suggest_name

SOURCE = "experiment.yaml"
"""The experiment as it was written, comments and all."""

_META_KEYS = ("run_id", "name", "created", "finished", "resolved_sha256", "tasks", "executor")
"""What run.json has besides "schema". finished: when, or null where the run was cut off and can be resumed."""

_ENVIRONMENT_PARTS = ("device", "host", "versions", "git")
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
    def name(self) -> str:
        """What messages call it: the folder's name, which two runs of one experiment do not share."""
        return self.path.resolve().name

    @property
    def finished(self) -> bool:
        return self.meta["finished"] is not None

    @property
    def progress(self) -> str:
        """ "2 of 5 tasks"."""
        return f"{len({row.task for row in self.rows if row.task})} of {self.meta['tasks']} tasks"


def read_run(path: Path) -> RecordedRun:
    """Reads the run in the folder `path`; a half-written end of results.jsonl is left out, and said.

    Raises:
        ExperimentError: It is no run's folder, of a newer schema, or damaged; names the file and the line.
    """
    meta = read_meta(path)
    resolved, repairs = _read_resolved(path / "resolved.yaml", meta["resolved_sha256"])
    environment = read_object(path / "environment.json")
    if odd_parts := [part for part in _ENVIRONMENT_PARTS if not isinstance(environment.get(part, {}), dict)]:
        raise ExperimentError([f"{path / 'environment.json'}: {', '.join(odd_parts)}: must be an object"])
    file, ended, tasks = path / "results.jsonl", meta["finished"] is not None, meta["tasks"]
    rows: list[Row] = []
    losses: list[str] = []
    if ended or file.exists():  # what was cut off before its first row may have none
        written, mended, torn = _read_lines(file, _version_of(meta))
        rows, cut_off = _whole_tasks(file, written)
        repairs, losses = [*repairs, *mended], [*torn, *cut_off]
    done = len({row.task for row in rows})
    if ended and not losses and done < tasks:
        losses.append(f"{file}: has the rows of {done} of the {tasks} tasks that the run ended with")
    return RecordedRun(path, meta, environment, resolved, tuple(rows), (*repairs, *losses), bool(losses))


def _read_resolved(file: Path, sha256: str) -> tuple[Mapping[str, Any], list[str]]:
    """The resolved experiment, and that it is not the one whose hash this is, where it is not."""
    text = _read(file)
    try:
        resolved = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise ExperimentError([f"{file}: not YAML: {error}"]) from None
    if not isinstance(resolved, dict):
        raise ExperimentError([f"{file}: must be a mapping of keys to values"])
    if hashlib.sha256(text).hexdigest() == sha256:
        return resolved, []
    return resolved, [f"{file}: changed since the run: its hash is not the one in run.json"]


def read_meta(path: Path) -> Mapping[str, Any]:
    """run.json of the folder `path`, all its keys there; raises ExperimentError as `read_run` does."""
    file = _find_meta(path)
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
    missing = [key for key in _META_KEYS if key not in meta]
    if missing:
        raise ExperimentError([f"{file}: lacks {', '.join(map(repr, missing))}"])
    return meta


def _find_meta(path: Path) -> Path:
    """The run.json of a folder that has one."""
    if not path.is_dir():
        what = "is a file; a run is a folder" if path.exists() else f"no such folder{_neighbour(path)}"
        raise ExperimentError([f"{path}: {what}"])
    file = path / "run.json"
    if not file.exists():
        found = "its results.jsonl is from before there was one" if (path / "results.jsonl").exists() else "not a run"
        raise ExperimentError([f"{path}: not a run of schema {SCHEMA}: there is no run.json ({found})"])
    return file


def _version_of(meta: Mapping[str, Any]) -> int:
    """Of a run's rows; run.json did not name the first."""
    return int(meta.get("rows_version", 1))


def check_version(path: Path, meta: Mapping[str, Any], what: str) -> None:
    """Raises ExperimentError where the run's rows are of an older version; what: that is not done with them."""
    if (version := _version_of(meta)) != VERSION:
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


def _read_lines(file: Path, version: int) -> tuple[list[Row], list[str], list[str]]:
    """The rows, a sentence for a last line that is kept although it was not written whole, and for one that is not."""
    lines = _read(file).split(b"\n")
    ends_whole = not lines[-1]
    lines = lines[:-1] if ends_whole else lines
    rows, mended, torn = [], [], []
    for number, line in enumerate(lines, 1):
        where = f"{file}: line {number}"
        try:
            data = json.loads(line)
        except ValueError as error:
            # Only the end of a file is ever half written: a torn line in its middle is damage of another kind.
            if number < len(lines):
                raise ExperimentError([f"{where} is no row: Invalid JSON: {error}"]) from None
            torn.append(f"{where}, the last, is half written ({len(line)} bytes): left out")
        else:
            rows.append(_validated_row(data, version, where))
    if not ends_whole and not torn:
        mended.append(f"{file}: line {len(lines)}, the last, is a whole row without its line's end: kept")
    return rows, mended, torn


def _whole_tasks(file: Path, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows of tasks that wrote all of theirs, and a sentence for each of the others."""
    cut_off = []
    written = Counter(row.task for row in rows)
    wanted = {row.task: row.task_rows for row in rows if row.task}
    for task, count in wanted.items():
        if written[task] > count:
            raise ExperimentError([f"{file}: task {task!r} has {written[task]} rows, and says that it wrote {count}"])
        if written[task] < count:
            cut_off.append(f"{file}: task {task!r} has {written[task]} of its {count} rows: they are left out")
    return [row for row in rows if not row.task or written[row.task] == wanted[row.task]], cut_off


def _validated_row(data: Any, version: int, where: str) -> Row:
    try:
        return Row.model_validate(from_version_1(data) if version == 1 else data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ExperimentError([f"{where} is no row: {place}{': ' if place else ''}{first['msg']}"]) from None
    except (TypeError, ValueError) as error:
        raise ExperimentError([f"{where} is no row of version {version}: {error}"]) from None
