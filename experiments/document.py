"""An experiment's YAML as plain data that remembers where each part came from, and `--set` overrides on top of it."""

import copy
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

PathParts = tuple[str | int, ...]

_PLACE = re.compile(r"line (\d+), column (\d+)\b")


class ExperimentError(ValueError):
    """What is wrong with an experiment, one line per problem, each with the YAML path it is at."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def dotted(parts: Iterable[str | int]) -> str:
    """("kernels", "paged_decode", 1) -> "kernels.paged_decode[1]"."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def nearest(name: object, known: Iterable[str]) -> str:
    """ "; did you mean ...?" for the closest of the known names, "" where none is close."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def in_order(problems: Iterable[str]) -> list[str]:
    """Each problem once, as they lie in the text; those that lie in none come last."""

    def place(problem: str) -> tuple[float, float]:
        found = _PLACE.search(problem)
        return (int(found[1]), int(found[2])) if found is not None else (math.inf, 0)

    return sorted(dict.fromkeys(problems), key=place)


@dataclass(frozen=True)
class Document:
    """`data` as YAML gave it, `folder` that its relative paths start from, and where each path was written.

    text: the file as it was written, comments and all, before any override. faults: what is wrong with it as YAML,
    where the rest could be read all the same. full: the document with its own section of that name applied, where it
    has one.
    """

    data: Mapping[str, Any]
    folder: Path
    places: Mapping[PathParts, str] = field(default_factory=dict)
    text: str = ""
    faults: tuple[str, ...] = ()
    full: "Document | None" = None

    def where(self, parts: PathParts) -> str:
        """The path and its place: "kernels.rope (quickstart.yaml, line 7, column 3)".

        Parts that only a normalized form has are left out (the index of a list of one that was written without its
        brackets); a last key that is missing is shown, at the place of its mapping.
        """
        data: Any = self.data
        known: PathParts = ()
        shown: PathParts = ()
        for depth, part in enumerate(parts):
            inside = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
            if inside:
                data = data[part]
                known = shown = (*known, part)
            elif isinstance(part, str) and depth == len(parts) - 1:
                shown = (*known, part)
        place = self.places.get(known)
        return f"{dotted(shown) or 'the experiment'}{f' ({place})' if place else ''}"

    def problem(self, parts: PathParts, message: str) -> str:
        return f"{self.where(parts)}: {message}"


@dataclass(frozen=True)
class Narrowed(Document):
    """A part of a sweep as a document of its own, whose problems are at their places in the whole one.

    origins: a path here -> that of the same thing in `whole`.
    """

    whole: Document = field(default_factory=lambda: Document({}, Path()))
    origins: Mapping[PathParts, PathParts] = field(default_factory=dict)

    def where(self, parts: PathParts) -> str:
        for length in range(len(parts), 0, -1):
            if parts[:length] in self.origins:
                return self.whole.where((*self.origins[parts[:length]], *parts[length:]))
        return self.whole.where(parts)


def read_document(file: Path, overrides: Sequence[str] = ()) -> Document:
    """Reads `file` and applies `--set` overrides, each "dotted.key=YAML value".

    Raises:
        ExperimentError: no such file, broken YAML (with its line), a key given twice, or an override that fits nowhere.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ExperimentError([f"{file}: cannot be read: {reason}"]) from None
    return parse_document(text, file.name, file.resolve().parent, overrides)


def parse_document(text: str, label: str, folder: Path, overrides: Sequence[str] = ()) -> Document:
    """`read_document` for YAML text; `label` is what its lines are called by in errors."""
    made = _document(text, label, folder, overrides, full=False)
    has_full = isinstance(made.data.get("full"), dict) and made.data["full"]
    return replace(made, full=_document(text, label, folder, overrides, full=True)) if has_full else made


def _document(text: str, label: str, folder: Path, overrides: Sequence[str], *, full: bool) -> Document:
    reader = _Reader(label, lambda mark: f"{label}, line {mark.line + 1}, column {mark.column + 1}")
    data = reader.read(text)
    if not isinstance(data, dict):
        raise ExperimentError([f"{label}: an experiment is a mapping of keys to values, got {type(data).__name__}"])
    for key, value in data["full"].items() if full else ():
        at = ("full", key)
        inside = {path[len(at) :]: place for path, place in reader.places.items() if path[: len(at)] == at}
        try:
            _put(data, reader.places, key, copy.deepcopy(value), inside)
        except ExperimentError as error:
            raise ExperimentError([f"full.{key} ({reader.places[at]}): {error}"]) from None
    for override in overrides:
        _override(data, reader.places, override)
    return Document(data, folder, reader.places, text, tuple(reader.faults))


class _Reader:
    """Reads YAML text, and keeps the place of every path. `label` names the text, `place` a mark in it."""

    def __init__(self, label: str, place: Callable[[yaml.Mark], str]) -> None:
        self.label = label
        self.place = place
        self.places: dict[PathParts, str] = {}
        self.faults: list[str] = []

    def read(self, text: str) -> Any:
        """The text as plain data; ExperimentError where it is not YAML."""
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            return None if node is None else self._value(loader, node, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = self.label if mark is None else self.place(mark)
            raise ExperimentError([f"{place}: not YAML: {error.problem or error.context}"]) from None
        except yaml.YAMLError as error:
            raise ExperimentError([f"{self.label}: not YAML: {error}"]) from None
        finally:
            loader.dispose()

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, path: PathParts) -> Any:
        """The node as plain data. PyYAML's own construction forgets places and lets a second key overwrite the first:
        here it is a fault, and the first stands.
        """
        self.places[path] = self.place(node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, item, (*path, i)) for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node)
        mapping: dict[str, Any] = {}
        for key_node, item in node.value:
            key, place = loader.construct_object(key_node), self.place(key_node.start_mark)
            if not isinstance(key, str):
                self.faults.append(f"{place}: key {key!r} must be a text")
            elif key in mapping:
                self.faults.append(f"{dotted((*path, key))} ({place}): given twice")
            else:
                mapping[key] = self._value(loader, item, (*path, key))
                self.places[(*path, key)] = place
        return mapping


def _override(data: dict[str, Any], places: dict[PathParts, str], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ExperimentError([f"--set {override}: must be key=value, as in --set scheduler.block_size=32"])
    place = f"--set {override}"
    reader = _Reader(place, lambda _: place)
    value = reader.read(text)
    if reader.faults:
        raise ExperimentError(reader.faults)
    reader.places[()] = place
    try:
        _put(data, places, key.strip(), value, reader.places)
    except ExperimentError as error:
        raise ExperimentError([f"{place}: {error}"]) from None


def _put(
    data: dict[str, Any], places: dict[PathParts, str], key: str, value: Any, inside: Mapping[PathParts, str]
) -> None:
    """Puts a value at a dotted key; `inside` has the places of what is in it."""
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in key.split(".")]
    target: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, list):
            target = _item(target, part, parts[:depth])
        else:
            # A key that is not there yet may still be a valid one with a default; the schema decides.
            if not isinstance(target.get(str(part)), dict | list):
                target[str(part)] = {}
            target = target[str(part)]
    path = tuple(parts)
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    places.update({(*path, *parts_inside): at for parts_inside, at in inside.items()})
    last = parts[-1]
    if isinstance(target, list):
        _item(target, last, parts[:-1])
        target[int(last)] = value
    else:
        target[str(last)] = value


def _item(items: list[Any], part: str | int, path: Sequence[str | int]) -> Any:
    if not isinstance(part, int) or part >= len(items):
        raise ExperimentError([f"{dotted(path)} is a list of {len(items)}, whose entries are 0, 1, ..."])
    return items[part]
