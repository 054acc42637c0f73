"""Pydantic's errors in the words of the YAML, with the place of each."""

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from experiments.document import Document, PathParts, nearest
from experiments.schema.workload import A_LENGTH, A_PRIORITY, WORKLOAD_KINDS

A_MODEL = "a model is exactly one of {preset: NAME}, {path: DIRECTORY} and {hub: ORG/NAME}"
_WORDING: Mapping[str, str] = {
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "mapping_type": "must be a mapping of keys to values",
    "list_type": "must be a list",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "string_type": "must be a text",
    "path_type": "must be a path",
    "too_short": "must be a list of at least {min_length}",
    "too_long": "must be a list of at most {max_length}",
}
"""Pydantic's error types in the words of the YAML."""


def _written(loc: PathParts) -> PathParts:
    """The path as the user wrote it: pydantic puts a workload's kind, and a union's type, in between and behind."""
    if loc[:1] == ("workload",) and len(loc) > 2 and loc[2] in WORKLOAD_KINDS:
        return (*loc[:2], *loc[3:])
    return loc[:4] if loc[:1] == ("shapes",) else loc


def explain(document: Document, model: type[BaseModel], error: dict[str, Any]) -> str:
    parts = _written(error["loc"])
    if error["type"] == "extra_forbidden":
        known = _keys_beside(model, error["loc"])
        return document.problem(parts, f"unknown key: there is {', '.join(known)}{nearest(parts[-1], known)}")
    if error["type"] == "missing":
        return document.problem(parts, "is required")
    if error["type"] == "union_tag_invalid":
        tag, known_tags = error["ctx"]["tag"], error["ctx"]["expected_tags"].replace("'", "")
        return document.problem(
            (*parts, "kind"), f"unknown kind {tag!r}: there is {known_tags}{nearest(tag, known_tags.split(', '))}"
        )
    if error["type"] == "literal_error":
        known_values = [text.strip("' ") for text in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
        value = error["input"]
        return document.problem(
            parts, f"unknown value {value!r}: there is {', '.join(known_values)}{nearest(value, known_values)}"
        )
    if error["type"] == "union_tag_not_found":
        return document.problem((*parts, "kind"), f"is required: there is {', '.join(WORKLOAD_KINDS)}")
    if parts[:1] == ("shapes",) and len(parts) == 4:
        return document.problem(parts, f"must be a whole number, true, false or a name, got {error['input']!r}")
    if error["type"] in _WORDING:
        wording = _WORDING[error["type"]].format(**error.get("ctx", {}))
        if isinstance(error["input"], dict):
            wording = wording.replace("a list of", "a mapping of")
        if error["type"] in ("model_type", "model_attributes_type"):
            wordings = {"model": A_MODEL, "priority": A_PRIORITY}
            wordings |= {"input_len": A_LENGTH, "output_len": A_LENGTH}
            wording = wordings.get(str(parts[-1]), wording)
        return document.problem(parts, f"{wording}, got {error['input']!r}")
    message = (
        error["msg"]
        .replace("Input should be", "must be")
        .removeprefix("Value error, ")
        .removeprefix("Assertion failed, ")
    )
    got = "" if error["type"] == "value_error" else f", got {error['input']!r}"
    return document.problem(parts, message[:1].lower() + message[1:] + got)


def _keys_beside(model: type[BaseModel], loc: PathParts) -> list[str]:
    """The keys that the mapping which holds the last of `loc` may have."""
    candidates = [model]
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        tagged = [
            c for c in candidates if "kind" in c.model_fields and part in get_args(c.model_fields["kind"].annotation)
        ]
        if tagged:
            candidates = tagged
            continue
        found = [m for c in candidates if part in c.model_fields for m in _models(c.model_fields[str(part)].annotation)]
        candidates = found or candidates
    return list(dict.fromkeys(name for candidate in candidates for name in candidate.model_fields))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and not get_origin(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list) or get_args(annotation):
        for argument in get_args(annotation):
            yield from _models(argument)
