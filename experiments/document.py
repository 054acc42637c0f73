"""An experiment's YAML as plain data that remembers where each part came from, and `--set` overrides on top of it."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PathParts = tuple[str | int, ...]


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


@dataclass(frozen=True)
class Document:
    """`data` as YAML gave it, `folder` that its relative paths start from, and where each path was written.

    text: the file as it was written, comments and all, before any override.
    """

    data: Mapping[str, Any]
    folder: Path
    places: Mapping[PathParts, str] = field(default_factory=dict)
    text: str = ""

    def where(self, parts: PathParts) -> str:
        """The path and its place: "kernels.rope (quickstart.yaml, line 7)".

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
    places: dict[PathParts, str] = {}
    data = _load(text, label, lambda line: f"{label}, line {line + 1}", places)
    if not isinstance(data, dict):
        raise ExperimentError([f"{label}: an experiment is a mapping of keys to values, got {type(data).__name__}"])
    for override in overrides:
        _override(data, places, override)
    return Document(data, folder, places, text)


def _load(text: str, label: str, place: Any, places: dict[PathParts, str]) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        return None if node is None else _value(loader, node, (), label, place, places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ExperimentError([f"{label}{line}: not YAML: {error.problem or error.context}"]) from None
    except yaml.YAMLError as error:
        raise ExperimentError([f"{label}: not YAML: {error}"]) from None
    finally:
        loader.dispose()


def _value(
    loader: yaml.SafeLoader, node: yaml.Node, path: PathParts, label: str, place: Any, places: dict[PathParts, str]
) -> Any:
    """The node as plain data. PyYAML's own construction forgets the lines and lets a second key overwrite the first."""
    places[path] = place(node.start_mark.line)
    if isinstance(node, yaml.SequenceNode):
        return [_value(loader, item, (*path, i), label, place, places) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    mapping: dict[str, Any] = {}
    for key_node, item in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise ExperimentError([f"{place(key_node.start_mark.line)}: key {key!r} must be a text"])
        if key in mapping:
            raise ExperimentError([f"{dotted((*path, key))} ({place(key_node.start_mark.line)}): given twice"])
        mapping[key] = _value(loader, item, (*path, key), label, place, places)
        places[(*path, key)] = place(key_node.start_mark.line)
    return mapping


def _override(data: dict[str, Any], places: dict[PathParts, str], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ExperimentError([f"--set {override}: must be key=value, as in --set scheduler.block_size=32"])
    parts: list[str | int] = [int(p) if p.isdigit() else p for p in key.strip().split(".")]
    target: Any = data
    for depth, part in enumerate(parts[:-1]):
        if isinstance(target, list):
            target = _item(target, part, override, parts[:depth])
        else:
            # A key that is not there yet may still be a valid one with a default; the schema decides.
            if not isinstance(target.get(str(part)), dict | list):
                target[str(part)] = {}
            target = target[str(part)]
    place = f"--set {override}"
    path = tuple(parts)
    for known in [known for known in places if known[: len(path)] == path]:
        del places[known]
    inside: dict[PathParts, str] = {}
    value = _load(text, place, lambda line: place, inside)
    places.update({(*path, *parts_inside): at for parts_inside, at in inside.items()})
    places[path] = place
    last = parts[-1]
    if isinstance(target, list):
        _item(target, last, override, parts[:-1])
        target[int(last)] = value
    else:
        target[str(last)] = value


def _item(items: list[Any], part: str | int, override: str, path: Sequence[str | int]) -> Any:
    if not isinstance(part, int) or part >= len(items):
        where = dotted(path)
        raise ExperimentError([f"--set {override}: {where} is a list of {len(items)}, whose entries are 0, 1, ..."])
    return items[part]
