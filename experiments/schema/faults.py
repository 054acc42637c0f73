"""Pydantic's errors in the words of the YAML, with the place of each."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from experiments.document import Document, PathParts
from experiments.schema.names import preset_names, unknown_name
from experiments.schema.workload import A_LENGTH, A_PRIORITY, WORKLOAD_KINDS
from tsched.torch_free import suggest_name

A_MODEL = "a model is exactly one of {preset: NAME}, {path: DIRECTORY} and {hub: ORG/NAME[@REVISION]}"
_A_MAPPING = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_WORDING: Mapping[str, str] = {
    **dict.fromkeys(_A_MAPPING, "must be a mapping of keys to values"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "list_type": "must be a list",
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
        model: What was validated.
        written: The path in the document of a path in the validated data.
    """
    path = written(_without_kind(error["loc"]))
    match error["type"]:
        case "extra_forbidden":
            known = _keys_beside(model, error["loc"])
            return document.problem(path, f"unknown key: there is {', '.join(known)}{suggest_name(path[-1], known)}")
        case "missing":
            return document.problem(path, "is required")
        case "union_tag_invalid":
            return document.problem((*path, "kind"), unknown_name("kind", error["ctx"]["tag"], WORKLOAD_KINDS))
        case "union_tag_not_found":
            return document.problem((*path, "kind"), f"is required: there is {', '.join(WORKLOAD_KINDS)}")
        case "literal_error":
            known = [text.strip("' ") for text in error["ctx"]["expected"].replace(" or ", ", ").split(",")]
            return document.problem(path, unknown_name("value", error["input"], known))
        case "value_error":
            return document.problem(path, error["msg"].removeprefix("Value error, "))
    return document.problem(path, f"{_wording(error)}, got {error['input']!r}{_suggest_model(document, error)}")


def _suggest_model(document: Document, error: dict[str, Any]) -> str:
    """What a text in place of a model means, as on a command line: "tiny", "random:Qwen3-0.6B" or a directory."""
    text = str(error["input"])
    if error["type"] not in ("model_type", "model_attributes_type") or "model" not in error["loc"]:
        return ""
    if text.removeprefix("random:") in preset_names():
        return f"; did you mean {{preset: {text.removeprefix('random:')}}}?"
    return f"; did you mean {{path: {text}}}?" if text and os.path.isdir(document.folder / text) else ""


def _wording(error: dict[str, Any]) -> str:
    """What a value must be, in the words of the YAML."""
    if error["type"] in ("model_type", "model_attributes_type"):
        key = next(part for part in reversed(error["loc"]) if isinstance(part, str))
        return _SECTION_FORMS.get(key, _WORDING[error["type"]])
    if error["type"] in _WORDING:
        wording = _WORDING[error["type"]].format(**error.get("ctx", {}))
        return wording.replace("a list of", "a mapping of") if isinstance(error["input"], dict) else wording
    message: str = error["msg"].replace("Input should be", "must be")
    return message[:1].lower() + message[1:]


def _without_kind(loc: PathParts) -> PathParts:
    """The path without a workload's kind, which pydantic puts into it."""
    is_of_kind = loc[0] == "workload" and len(loc) > 2 and loc[2] in WORKLOAD_KINDS
    return (*loc[:2], *loc[3:]) if is_of_kind else loc


def _keys_beside(model: type[BaseModel], loc: PathParts) -> list[str]:
    """The keys that the mapping which holds the last of `loc` may have."""
    models = [model]
    for part in (part for part in loc[:-1] if isinstance(part, str)):
        models = [found for one in models for found in _models_below(one, part)] or models
    return list(dict.fromkeys(name for one in models for name in one.model_fields))


def _models_below(model: type[BaseModel], part: str) -> list[type[BaseModel]]:
    """The models that a field of a model may hold; of the kind that it is itself, the model."""
    fields = model.model_fields
    if "kind" in fields and part in get_args(fields["kind"].annotation):
        return [model]
    return list(_models(fields[part].annotation)) if part in fields else []


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)
