"""GET /docs: the OpenAPI document as one page, which needs no network and runs no script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

_TEMPLATE = Path(__file__).with_suffix(".html")
_STYLE = Path(__file__).with_suffix(".css")
_RECORDS = "#/components/schemas/"


class Field(NamedTuple):
    """A field of a record: its name, what it may be, its default in JSON, and whether it must be given."""

    name: str
    kind: str
    default: str
    is_required: bool


class Answer(NamedTuple):
    """An answer of a route: its status, when it comes, and the records that it may be."""

    status: str
    meaning: str
    records: list[str]


class Route(NamedTuple):
    """A route as the page shows it; `body` is the record that it takes and `example` one in JSON, "" without a body."""

    method: str
    path: str
    meaning: str
    body: str
    example: str
    answers: list[Answer]


def render_docs(document: Mapping[str, Any]) -> str:
    """The page of an OpenAPI document."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    records = {
        name: [*_read_fields(schema)]
        for name, schema in sorted(document["components"]["schemas"].items())
        if "properties" in schema
    }
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        info=document["info"], style=_read_style(), routes=[*_read_routes(document)], records=records
    )


def docs_headers() -> dict[str, str]:
    """Headers with which a browser takes the page's own style and nothing else from anywhere."""
    digest = base64.b64encode(hashlib.sha256(_read_style().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return {"content-security-policy": f"{policy}; frame-ancestors 'none'", "x-content-type-options": "nosniff"}


def _read_style() -> str:
    return _STYLE.read_text(encoding="utf-8")


def _read_routes(document: Mapping[str, Any]) -> Iterator[Route]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {})
            example = json.dumps(body["example"]) if "example" in body else ""
            answers = [
                Answer(status, answer["description"], sorted(set(_find_records(answer.get("content", {})))))
                for status, answer in sorted(route["responses"].items())
            ]
            meaning = route.get("description") or route.get("summary", "")
            record = next(_find_records(body), "")
            yield Route(method.upper(), path, meaning, record, example, answers)


def _find_records(schema: Any) -> Iterator[str]:
    """The names of the records that a part of the document refers to."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            yield reference.removeprefix(_RECORDS)
        for part in schema.values():
            yield from _find_records(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _find_records(part)


def _read_fields(schema: Mapping[str, Any]) -> Iterator[Field]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = json.dumps(field["default"]) if "default" in field else ""
        yield Field(name, _describe_kind(field), default, name in required)


def _describe_kind(schema: Mapping[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_RECORDS)
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(json.dumps(one) for one in schema["enum"])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_describe_kind(one) for one in options))
    kind = schema.get("type", "any JSON")
    if kind == "array":
        return f"list of {_describe_kind(schema.get('items', {}))}"
    return "null alone" if kind == "null" and "default" in schema else str(kind)
