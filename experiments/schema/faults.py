"""Pydantic's errors in the words of the YAML, with the place of each."""

from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from experiments.document import Document, PathParts
from experiments.schema.names import unknown_name
from experiments.schema.workload import A_LENGTH, A_PRIORITY, WORKLOAD_KINDS
from tsched.torch_free import suggest_name

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


_SECTION_FORMS: Mapping[str, str] = {
    "model": A_MODEL,
    "priority": A_PRIORITY,
    "input_len": A_LENGTH,
    "output_len": A_LENGTH,
}
"""What a key takes where a mapping may be written in a shorter form."""


def explain(
    document: Document, model: type[BaseModel], error: dict[str, Any], written: Callable[[PathParts], PathParts]
) -> str:
    """One of pydantic's errors as a problem of the document.

    Args:
        model: what was validated.
        written: the path in the document of a path in the validated data.
    """
    path = written(_without_types(error["loc"]))
    match error["type"]:
        case "extra_forbidden":
            known = _keys_beside(model, error["loc"])
            return document.problem(path, f"unknown key: there is {', '.join(known)}{suggest_name(path[-1], known)}")
        case "missing":
            return document.problem(path, "is required")
        case "union_tag_invalid":
            tag = error["ctx"]["tag"]
            known = error["ctx"]["expected_tags"].replace("'", "").split(", ")
            return document.problem((*path, "kind"), unknown_name("kind", tag, known))
        case "union_tag_not_found":
            return document.problem((*path, "kind"), f"is required: there is {', '.join(WORKLOAD_KINDS)}")
        case "literal_error":
            known = [text.strip("' ") for text in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
            return document.problem(path, unknown_name("value", error["input"], known))
        case "value_error":
            return document.problem(path, error["msg"].removeprefix("Value error, "))
    return document.problem(path, f"{_wording(error)}, got {error['input']!r}")


def _wording(error: dict[str, Any]) -> str:
    """What a value must be, in the words of the YAML."""
    loc = error["loc"]
    if loc[0] == "shapes" and len(loc) > 4:
        return "must be a whole number, true, false or a name"
    if error["type"] in ("model_type", "model_attributes_type"):
        key = next(part for part in reversed(loc) if isinstance(part, str))
        return _SECTION_FORMS.get(key, _WORDING[error["type"]])
    if error["type"] in _WORDING:
        wording = _WORDING[error["type"]].format(**error.get("ctx", {}))
        return wording.replace("a list of", "a mapping of") if isinstance(error["input"], dict) else wording
    message: str = error["msg"].replace("Input should be", "must be")
    return message[:1].lower() + message[1:]


def _without_types(loc: PathParts) -> PathParts:
    """The path without what pydantic puts into it: a workload's kind, and a union's type."""
    if loc[:1] == ("workload",) and len(loc) > 2 and loc[2] in WORKLOAD_KINDS:
        return (*loc[:2], *loc[3:])
    return loc[:5] if loc[:1] == ("shapes",) else loc


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
