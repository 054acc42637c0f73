"""How the circumstances of two runs differ: what forbids comparing their speeds, and what only has to be said."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from experiments.runs.reading import RecordedRun, workload_key
from experiments.runs.rows import Row


def _device(run: RecordedRun) -> Any:
    device = run.environment.get("device", {})
    return {key: device.get(key) for key in ("name", "type", "arch", "triton")}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _dtypes(run: RecordedRun) -> Any:
    return {str(name): True for name in _listed(run.resolved.get("dtype"))}


def _models(run: RecordedRun) -> Any:
    """Each by its name, and its files' hashes where they are known: a directory may hold other weights next month. An
    only one has no name, for its directory may have another.
    """
    files = dict(run.environment.get("model") or {})
    if not files:
        files = {json.dumps(source, sort_keys=True): source for source in _listed(run.resolved.get("model"))}
    return files if len(files) > 1 else {"": next(iter(files.values()))}


def _workloads(run: RecordedRun) -> Any:
    """Each by its name; of a trace not where it lies, but what was in it, where that is known."""
    files = run.environment.get("files") or {}
    found = {}
    for one in _listed(run.resolved.get("workload", [])):
        name = str(one.get("name", ""))
        if (trace := files.get(workload_key(name))) is not None:
            one = {**_without(one, ("file",)), "file's sha256": trace["sha256"]}
        found[name] = one
    return found


WHATS: Mapping[str, Callable[[RecordedRun], Any]] = {
    "device": _device,
    "dtype": _dtypes,
    "model": _models,
    "threads": lambda run: run.environment.get("host", {}).get("torch_threads"),
    "workload": _workloads,
}
"""What a difference of speed would be no news across, by the name under which `--across` allows it."""

_SAID_ELSEWHERE = ("name", "device", "dtype", "model", "workload")
_NO_CIRCUMSTANCE = ("run_id", "model")


_SEVERAL = ("dtype", "model", "workload")
"""Of which a run may have several, by name: those that both have are compared, and must be the same."""


def forbidding(first: RecordedRun, second: RecordedRun) -> dict[str, str]:
    """Name of WHATS -> the two values, for each that the runs do not share."""
    found = {}
    for what, of in WHATS.items():
        one, other = of(first), of(second)
        if what in _SEVERAL and (shared := one.keys() & other.keys()):
            one, other = ({name: some[name] for name in sorted(shared)} for some in (one, other))
        if one != other:
            if what == "dtype":
                one, other = ", ".join(one), ", ".join(other)
            found[what] = "; ".join(_change(path, a, b) for path, a, b in _leaves(one, other))
    return found


def share_yardstick(first: RecordedRun, second: RecordedRun) -> bool:
    """Whether the yardsticks of both runs were the same work: rows of version 1 took it of numpy's, on one thread."""
    torch = (run.environment.get("versions", {}).get("torch") for run in (first, second))
    return (
        first.rows_version == second.rows_version
        and len(set(torch)) == 1
        and "threads" not in forbidding(first, second)
    )


def circumstances(first: RecordedRun, second: RecordedRun) -> list[str]:
    """What else differs: code, versions, lockfile, seeds, and other keys of the YAML, a line for each; files that git
    does not track come last, for a folder of them can be a thousand lines.
    """
    changes = [
        *_leaves({"executor": first.meta["executor"]}, {"executor": second.meta["executor"]}),
        *_leaves(_surroundings(first), _surroundings(second)),
        *_leaves(_without(first.resolved, _SAID_ELSEWHERE), _without(second.resolved, _SAID_ELSEWHERE)),
    ]
    return [_change(*change) for change in sorted(changes, key=lambda change: change[0].startswith("git.untracked"))]


def _surroundings(run: RecordedRun) -> dict[str, Any]:
    """The environment, without what tells models and workloads apart: that is said where it forbids a comparison."""
    workloads = [workload_key(name) for name in _workloads(run)]
    found = _without(run.environment, _NO_CIRCUMSTANCE)
    return {**found, "files": _without(found.get("files") or {}, workloads)}


def _without(tree: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


_FACTS: Mapping[str, tuple[str, ...]] = {
    "engine": (
        "texts", "requests_failed", "output_tokens", "steps", "preemptions", "peak_running", "hit_tokens",
        "evicted_blocks", "weight_bytes",
    ),
    "parity": ("tokens_equal", "requests_equal", "first_divergence"),
}  # fmt: skip
"""Stage -> what is not of time and should be the same when it is run again."""


def changed_facts(first: RecordedRun, second: RecordedRun) -> list[str]:
    """Rows of the same thing, process by process, whose status, tokens or counts are others; a line for each."""
    rows = [{_thing(row): row for row in run.rows} for run in (first, second)]
    lines = []
    for thing in rows[0].keys() & rows[1].keys():
        before, after = rows[0][thing], rows[1][thing]
        about = ", ".join(part for part in thing if part)
        if before.status != after.status:
            lines.append(f"{about}: {_said(before)}, then {_said(after)}")
            continue
        facts = _FACTS.get(before.stage, ()) if before.status == "ok" else ()
        for name in facts:
            if (one := getattr(before, name)) != (other := getattr(after, name)):
                lines.append(f"{about}: {_change(name, one, other)}")
    return sorted(lines)


def _said(row: Row) -> str:
    return f"{row.status} ({row.reason})" if row.reason else row.status


def _thing(row: Row) -> tuple[str, ...]:
    """What a row is about, its process included."""
    arm = ", ".join(f"{op}={label}" for op, label in sorted(row.arm.items()))
    settings = ", ".join(f"{key}={value}" for key, value in sorted(row.settings.items()))
    named = [getattr(row, name, None) for name in ("op", "variant", "point", "workload", "peer", "method", "bits")]
    codes = [getattr(row, "group_size", None), getattr(row, "range", None), getattr(row, "clock", None)]
    parts = [row.stage, "" if row.op else arm, settings, *named, *codes, row.dtype, f"process {row.replicate}"]
    return tuple("" if part is None else str(part) for part in parts)


def _leaves(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, value, value) wherever two trees of mappings differ; what one does not have is _ABSENT."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            inside = f"{path}.{key}" if path else str(key)
            yield from _leaves(one.get(key, _ABSENT), other.get(key, _ABSENT), inside)
    elif one != other:
        yield path, one, other


_ABSENT = object()


def _change(path: str, one: Any, other: Any) -> str:
    return f"{path + ': ' if path else ''}{_short(one)}, then {_short(other)}"


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
