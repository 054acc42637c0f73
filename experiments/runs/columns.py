"""columns.json: what each column of results.jsonl is, for whoever reads it without this code."""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter

from experiments.runs.reading import SCHEMA
from experiments.runs.rows import Row

ROW_TYPES: tuple[type[BaseModel], ...] = get_args(get_args(Row)[0])
"""Every kind of row."""


def columns() -> dict[str, Any]:
    """{"schema", "every row": {column: about}, "stages": {stage: {column: about}}}; about: type, unit, meaning, and
    of a stage's own columns "given": the statuses of the rows that have them.

    type: as JSON has it, "or null" where it may be. A number is a finite one: "not_finite" tells which are null for it.
    """
    shared = set.intersection(*(set(row.model_fields) for row in ROW_TYPES)) - {"stage"}
    schemas = {row: TypeAdapter(row).json_schema()["properties"] for row in ROW_TYPES}
    first = ROW_TYPES[0]
    stages = {}
    for row, schema in schemas.items():
        own = [name for name in row.model_fields if name not in shared and name != "stage"]
        given: Mapping[str, frozenset[str]] = getattr(row, "required")  # noqa: B009  of _Row, which BaseModel hides
        stages[str(schema["stage"]["const"])] = {
            name: {**_about(schema[name]), "given": [status for status, names in given.items() if name in names]}
            for name in own
        }
    every = {name: _about(schemas[first][name]) for name in first.model_fields if name in shared}
    every["stage"] = {"type": "string", "unit": None, "meaning": "which of the stages below the row is of"}
    return {"schema": SCHEMA, "every row": every, "stages": stages}


def _about(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": _type(schema), "unit": schema["unit"], "meaning": schema["description"]}


def _type(schema: Mapping[str, Any]) -> str:
    """ "number or null", "array of number", "object of string" of a JSON schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    kind = str(schema.get("type", "any"))
    inner = schema.get("items") or schema.get("additionalProperties")
    return f"{kind} of {_type(inner)}" if isinstance(inner, Mapping) else kind
