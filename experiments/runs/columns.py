"""columns.json: what each column of results.jsonl is, for whoever reads it without this code."""

from collections.abc import Mapping
from typing import Any

from experiments.runs.reading import SCHEMA
from experiments.runs.rows import COLUMNS, ROW, SHARED, VERSION


def columns() -> dict[str, Any]:
    """{"schema", "rows_version", "every row": {column: about}, "stages": {stage: {column: about}}}; about: type, unit,
    meaning, and of a stage's own columns "given": the statuses of the rows that have them.

    type: as JSON has it, "or null" where it may be. A number is a finite one: "not_finite" says which are null for it.
    """
    schema = ROW.json_schema()["properties"]
    every = {name: _about(one) for name, one in schema.items() if name in SHARED}
    stages = {
        stage: {
            name: {**_about(schema[name]), "given": [status for status, names in given.items() if name in names]}
            for name in dict.fromkeys(name for names in given.values() for name in names)
        }
        for stage, given in COLUMNS.items()
    }
    return {"schema": SCHEMA, "rows_version": VERSION, "every row": every, "stages": stages}


def unit_of(figure: str) -> str | None:
    """The unit of a column's numbers, "ttft_s.p50" included; None of what is no number."""
    unit: str | None = _SCHEMA[figure.partition(".")[0]]["unit"]
    return unit


_SCHEMA: Mapping[str, Any] = ROW.json_schema()["properties"]


def _about(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": _type(schema), "unit": schema["unit"], "meaning": schema["description"]}


def _type(schema: Mapping[str, Any]) -> str:
    """ "number or null", "array of number", "object of string" of a JSON schema."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    kind = str(schema.get("type", "any"))
    inner = schema.get("items") or schema.get("additionalProperties")
    return f"{kind} of {_type(inner)}" if isinstance(inner, Mapping) else kind
