"""An experiment's YAML as plain data that remembers where each part came from, and `--set` overrides on top of it."""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from tsched.torch_free import TKernelsError

PathParts = tuple[str | int, ...]

Report = Callable[[PathParts, str], None]
"""Takes a path of a document and what is wrong there."""

Nodes = tuple[yaml.Node, ...]

_MOST_ALIASED = 100_000
"""Parts that a document may have beyond the characters of its text: an alias writes much with little."""

_MERGE = "tag:yaml.org,2002:merge"
_COLLECTIONS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
_PLACE = re.compile(r"line (\d+), column (\d+)\b")


class ExperimentError(TKernelsError, ValueError):
    """What is wrong with an experiment, one line per problem, each with the YAML path it is at."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def format_path(parts: Iterable[str | int]) -> str:
    """("kernels", "paged_decode", 1) -> "kernels.paged_decode[1]"."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def entries(value: Any) -> list[Any]:
    """The entries of a section that may be one thing without brackets, or nothing."""
    return value if isinstance(value, list) else [] if value is None else [value]


def as_mapping(value: Any) -> dict[str, Any]:
    """The value; an empty mapping where it is none, which is the schema's to refuse."""
    return value if isinstance(value, dict) else {}


def sort_problems(problems: Iterable[str]) -> list[str]:
    """Each problem once, as they lie in the text; those that lie in none come last."""

    def place(problem: str) -> tuple[float, float]:
        found = _PLACE.search(problem)
        return (int(found[1]), int(found[2])) if found is not None else (math.inf, 0)

    return sorted(dict.fromkeys(problems), key=place)


@dataclass(frozen=True)
class Document:
    """An experiment's file as plain data that knows where each part was written.

    Attributes:
        data: As YAML gave it, with overrides.
        folder: Where its relative paths start.
        places: Path -> the file, line and column, or the override, that wrote it.
        text: The file as it was written, comments and all, before any override.
        faults: What is wrong with it as YAML, and overrides that fit nowhere, where the rest could be read.
        full: The document with its own section of that name applied, where it has one.
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
        return f"{format_path(shown) or 'the experiment'}{f' ({place})' if place else ''}"

    def problem(self, parts: PathParts, message: str) -> str:
        return f"{self.where(parts)}: {message}"


def read_document(file: Path, overrides: Sequence[str] = ()) -> Document:
    """Reads `file` and applies `--set` overrides, each "dotted.key=YAML value".

    A key that is given twice, or an override that fits nowhere, is one of the document's `faults`.

    Raises:
        ExperimentError: There is no such file, or it is not YAML; it names the line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ExperimentError([f"{file}: cannot be read: {reason}"]) from None
    return parse_document(text, file.name, file.resolve().parent, overrides)


def parse_document(text: str, label: str, folder: Path, overrides: Sequence[str] = ()) -> Document:
    """`read_document` for YAML text; `label` is what its lines are called by in errors."""
    made = _make_document(text, label, folder, overrides, full=False)
    has_full = as_mapping(made.data.get("full"))
    return replace(made, full=_make_document(text, label, folder, overrides, full=True)) if has_full else made


def _make_document(text: str, label: str, folder: Path, overrides: Sequence[str], *, full: bool) -> Document:
    reader = _Reader(label)
    data = reader.read(text)
    if data is None:
        raise ExperimentError([f"{label}: is empty; an experiment is a mapping of keys to values"])
    if not isinstance(data, dict):
        found = "a list" if isinstance(data, list) else f"the {type(data).__name__} {str(data)[:40]!r}"
        raise ExperimentError([f"{label}: an experiment is a mapping of keys to values, got {found}"])
    of_full, others = ([one for one in overrides if _is_of_full(one) == wanted] for wanted in (True, False))
    faults = [*reader.faults, *_apply_overrides(data, reader.places, of_full)]
    if full:
        faults += _apply_sizes(data, reader.places)
    faults += _apply_overrides(data, reader.places, others)
    return Document(data, folder, reader.places, text, tuple(faults))


def _apply_sizes(data: dict[str, Any], places: dict[PathParts, str]) -> list[str]:
    """Puts what the section `full` holds at its paths; returns what is wrong with it."""
    faults = []
    for key, value in as_mapping(data.get("full")).items():
        at = ("full", key)
        inside = {path[len(at) :]: place for path, place in places.items() if path[: len(at)] == at}
        try:
            if _parse_path(key)[0] == "full":
                raise ExperimentError(["is not one of the sizes, but where they are"])
            _put_value(data, places, _parse_path(key), copy.deepcopy(value), inside)
        except ExperimentError as error:
            faults.append(f"full.{key} ({places[at]}): {error}")
    return faults


class _Reader:
    """Reads YAML text, and keeps the place of every path: `label`, and the line and column in a text that has lines."""

    def __init__(self, label: str, *, has_lines: bool = True) -> None:
        self.label = label
        self.has_lines = has_lines
        self.places: dict[PathParts, str] = {}
        self.faults: list[str] = []
        self.parts_left = 0  # until there is a text

    def place(self, mark: yaml.Mark) -> str:
        return f"{self.label}, line {mark.line + 1}, column {mark.column + 1}" if self.has_lines else self.label

    def read(self, text: str) -> Any:
        """The text as plain data; ExperimentError where it is not YAML."""
        self.parts_left = len(text) + _MOST_ALIASED
        try:
            loader = yaml.SafeLoader(text)
        except ReaderError as error:
            before = text[: error.position]
            at = yaml.Mark(self.label, 0, before.count("\n"), len(before) - before.rfind("\n") - 1, None, 0)
            message = f"not YAML: the character U+{ord(text[error.position]):04X} is not allowed in it"
            raise ExperimentError([f"{self.place(at)}: {message}"]) from None
        try:
            node = loader.get_single_node()
            return None if node is None else self._value(loader, node, ())
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = self.label if mark is None else self.place(mark)
            raise ExperimentError([f"{place}: not YAML: {error.problem or error.context}"]) from None
        except RecursionError:
            raise ExperimentError([f"{self.label}: its lists and mappings lie too deep in each other"]) from None
        finally:
            loader.dispose()

    def _value(self, loader: yaml.SafeLoader, node: yaml.Node, path: PathParts, outer: Nodes = ()) -> Any:
        """The node as plain data, inside the nodes `outer`. PyYAML's own construction forgets places, lets a second key
        overwrite the first (here it is a fault, and the first stands), and follows an alias of what it is in for ever.
        """
        self.parts_left -= 1
        if self.parts_left < 0:
            raise ExperimentError([f"{self.label}: its aliases stand for more than {_MOST_ALIASED:,} parts"])
        self.places[path] = self.place(node.start_mark)
        if node in outer:
            self._fault(path, "is an alias of what it is in")
            return None
        outer = (*outer, node)
        if isinstance(node, yaml.CollectionNode) and node.tag not in _COLLECTIONS:
            self._fault(path, f"the tag {node.tag!r} is none of a list or mapping")
        if isinstance(node, yaml.SequenceNode):
            return [self._value(loader, item, (*path, i), outer) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(loader, node, path, outer)
        return self._scalar(loader, node, path)

    def _mapping(
        self, loader: yaml.SafeLoader, node: yaml.MappingNode, path: PathParts, outer: Nodes
    ) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, item in node.value:
            if key_node.tag == _MERGE:
                merged += item.value if isinstance(item, yaml.SequenceNode) else [item]
                self.places[(*path, "<<")] = self.place(key_node.start_mark)
                continue
            key, place = self._scalar(loader, key_node, path), self.place(key_node.start_mark)
            if not isinstance(key, str):
                self.faults.append(f"{place}: key {key!r} must be a text")
            elif key in mapping:
                self.faults.append(f"{format_path((*path, key))} ({place}): given twice")
            else:
                mapping[key] = self._value(loader, item, (*path, key), outer)
                self.places[(*path, key)] = place
        for base in merged:
            self._merge(loader, base, mapping, path, outer)
        return mapping

    def _merge(
        self, loader: yaml.SafeLoader, base: yaml.Node, mapping: dict[str, Any], path: PathParts, outer: Nodes
    ) -> None:
        """What `<<` names, where the mapping does not say it itself."""
        known = {at: place for at, place in self.places.items() if at[: len(path)] == path}
        more = self._value(loader, base, path, outer)
        self.places |= known  # of what the mapping says itself
        if isinstance(more, dict):
            mapping |= {key: value for key, value in more.items() if key not in mapping}
        else:
            self._fault((*path, "<<"), "takes a mapping, or a list of mappings")

    def _scalar(self, loader: yaml.SafeLoader, node: yaml.Node, path: PathParts) -> Any:
        try:
            value = loader.construct_object(node)
        except (ValueError, LookupError, AttributeError):  # what PyYAML lets through of "2024-13-45" and "!!int x"
            kind = node.tag.rpartition(":")[2]
            self._fault(path, f"{node.value!r} looks like a{'n' * (kind == 'int')} {kind}, and is none")
            return node.value
        if isinstance(value, str) and "\0" in value:
            self._fault(path, f"{value!r} has the character U+0000, which no file's name and no prompt may have")
            return value.replace("\0", "")
        return value

    def _fault(self, path: PathParts, message: str) -> None:
        self.faults.append(f"{format_path(path) or self.label} ({self.places.get(path, self.label)}): {message}")


def _apply_overrides(data: dict[str, Any], places: dict[PathParts, str], overrides: Iterable[str]) -> list[str]:
    """Puts the values of overrides at their paths; returns what is wrong with them."""
    faults: list[str] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        place = f"--set {override}"
        if not equals or not key.strip():
            faults.append(f"{place}: must be key=value, as in --set scheduler.block_size=32")
            continue
        reader = _Reader(place, has_lines=False)
        try:
            value = reader.read(text)
        except ExperimentError as error:
            reader.faults += error.problems
        if reader.faults:
            faults += reader.faults
            continue
        reader.places[()] = place
        try:
            _put_value(data, places, _parse_path(key.strip()), value, reader.places)
        except ExperimentError as error:
            faults.append(f"{place}: {error}")
    return faults


def _parse_path(key: str) -> PathParts:
    """ "kernels.swiglu.1" -> ("kernels", "swiglu", 1). The keys of `full` are such texts themselves."""
    if key.startswith("full."):
        return "full", key.removeprefix("full.")
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _is_of_full(override: str) -> bool:
    return _parse_path(override.partition("=")[0].strip())[0] == "full"


def _put_value(
    data: dict[str, Any], places: dict[PathParts, str], path: PathParts, value: Any, inside: Mapping[PathParts, str]
) -> None:
    """Puts a value at a path; `inside` has the places of what is in it."""
    target: Any = data
    for depth, part in enumerate(path[:-1]):
        if isinstance(target, list):
            target = _check_item(target, part, path[:depth])
            if not isinstance(target, dict | list):
                raise ExperimentError([f"{format_path(path[: depth + 1])} is {target!r}, with nothing inside"])
        else:
            # A key that is not there yet may still be a valid one with a default; the schema decides.
            if not isinstance(target.get(str(part)), dict | list):
                target[str(part)] = {}
                places[path[: depth + 1]] = inside[()]  # whoever finds it unknown can say where it was asked for
            target = target[str(part)]
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    places.update({(*path, *parts_inside): at for parts_inside, at in inside.items()})
    last = path[-1]
    if isinstance(target, list):
        _check_item(target, last, path[:-1])
        target[int(last)] = value
    else:
        target[str(last)] = value


def _check_item(items: list[Any], part: str | int, path: Sequence[str | int]) -> Any:
    if not isinstance(part, int) or part >= len(items):
        raise ExperimentError([f"{format_path(path)} is a list of {len(items)}, whose entries are 0, 1, ..."])
    return items[part]
