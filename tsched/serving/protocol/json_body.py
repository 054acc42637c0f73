"""JSON bodies, read with bounds: what a later reader could stumble over is refused here."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tsched.serving.protocol.errors import ApiError, invalid_value, unsupported_parameter
from tsched.torch_free import suggest_name

ModelT = TypeVar("ModelT", bound=BaseModel)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_KEYS = 10_000  # of an object; what is wrong with each would be collected
_MAX_SHOWN = 100  # characters of a wrong value


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: It is no UTF-8, no JSON, no object, nested too deeply, or holds a key twice, a number that is none or
            has thousands of digits, or half a surrogate pair.
    """
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_make_object,
            parse_constant=_refuse_constant,
            parse_float=_parse_float,
            parse_int=_parse_int,
        )
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise _no_json(f"is not UTF-8 at byte {error.start}") from None
    except UnicodeEncodeError:
        raise _no_json("holds half of a surrogate pair") from None
    except RecursionError:
        raise _no_json("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _no_json(f"is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError as error:  # of the hooks, and of an integer of thousands of digits
        raise _no_json(f"is refused: {error}") from None
    if not isinstance(value, dict):
        raise _no_json(f"must be a JSON object, got {type(value).__name__}")
    return value


def parse_request(kind: type[ModelT], body: bytes) -> ModelT:
    """The request of an API that a body holds.

    Raises:
        ApiError: As `parse_json`; or a field is wrong, unknown, unsupported or missing. `param` names the first such.
    """
    value = parse_json(body)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _describe(kind, error) from None


def _describe(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first of pydantic's errors; a field of several types has one for each, and they are said together."""
    errors = error.errors(include_url=False, include_context=True)
    first = errors[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if field is None:
        return invalid_value(str(first["msg"]).removeprefix("Value error, "), None)
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        hint = suggest_name(field, kind.model_fields)
        return unsupported_parameter(field[:_MAX_SHOWN], f"there is no parameter {_show(field)}{hint}")
    if first["type"] == "none_required":
        return unsupported_parameter(field, f"{field} is not supported here: leave it out")
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return invalid_value(f"{field} is required", field, "missing_required_parameter")
    places = [one for one in errors if one["loc"][:1] == first["loc"][:1]]
    # Where one of the types fits, and what it holds does not, the others say nothing.
    places = [one for one in places if not one["type"].endswith("_type")] or places
    reasons = list(dict.fromkeys(_reason(one) for one in places[:4]))
    shown, types = _show(places[0]["input"]), kind.model_fields[field].description
    if types is not None and len(reasons) > 1:
        return invalid_value(f"{field} must be {types}, got {shown}", field)
    return invalid_value(f"{field}: {' or '.join(reasons)}, got {shown}", field)


def _reason(error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"][1:] if isinstance(part, int) or str(part).isidentifier())
    reason = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return f"{where[:_MAX_SHOWN]} {reason}" if where else reason


def _show(value: Any) -> str:
    """A wrong value, short."""
    if isinstance(value, (dict, list)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of hundreds of digits"
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _no_json(what: str) -> ApiError:
    return invalid_value(f"the body {what}", None, "invalid_json")


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, and {_MAX_KEYS} are read")
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {_show(twice)} stands in an object twice")
    return made


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _parse_int(text: str) -> int:
    """In Python, between whose lines other threads run: a million integers would keep them waiting in C."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a number of {len(text)} digits is too long") from None


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {_show(text)} is too large")
    return number
