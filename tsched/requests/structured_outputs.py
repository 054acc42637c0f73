"""The form that an output must have. Names are vLLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tsched.requests.errors import ArgumentError
from tsched.requests.repetitions import find_repeated_repetition
from tsched.requests.vllm_names import FORM_NAMES, refuse_other_names

MAX_GRAMMAR_LENGTH = 2**16  # characters of a schema, a regex or a grammar
MAX_CHOICES = 1000
MAX_SCHEMA_DEPTH = 100  # levels of objects and lists
_SHOWN = 100  # characters of a part of a regex
_DATA = frozenset({"const", "enum", "default", "examples"})  # of a schema: their values are no schemas
_LARK_PIECE = re.compile(r'"(?:\\.|[^"\\])*"|//.*|/((?:\\.|[^/\\\n])+)/')  # a text, a comment, a regex


@refuse_other_names(FORM_NAMES)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that an output must have: exactly one of these.

    Attributes:
        json: A JSON schema, as a mapping or its text, of up to 100 levels. The output is JSON of that schema.
        regex: A regular expression in the syntax of Rust's regex. The whole output matches it. Here and in the patterns
            of a schema or grammar, nothing but a repetition without bound is not repeated without bound: (a+)+ says
            what a+ says.
        choice: Up to 1000 texts, of which the output is one.
        grammar: A grammar in Lark's syntax, or in GBNF.
        json_object: True, for any JSON object.

    Raises:
        ArgumentError: None or several are given, or one has a wrong value. The message has its name.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json_object, bool) and not self.json_object:
            object.__setattr__(self, "json_object", None)
        given = [one.name for one in fields(self) if getattr(self, one.name) is not None]
        if len(given) != 1:
            names = ", ".join(one.name for one in fields(self))
            raise ArgumentError(
                f"structured_outputs must have exactly one of {names}; got {' and '.join(given) or 'none'}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _read_schema(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _check_choices(self.choice))
        elif self.json_object is not None and not isinstance(self.json_object, bool):
            raise ArgumentError(f"structured_outputs.json_object must be True or False, got {self.json_object!r}")
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.regex is not None:
            _check_regex("structured_outputs.regex", self.regex)
        for piece in _LARK_PIECE.finditer(self.grammar or ""):
            _check_regex("structured_outputs.grammar has a regex that", piece[1] or "")

    @property
    def field(self) -> str:
        """The field that is given."""
        return next(one.name for one in fields(self) if getattr(self, one.name) is not None)

    @property
    def name(self) -> str:
        """What refusals call it."""
        return f"structured_outputs.{self.field}"

    @property
    def definition(self) -> tuple[str, str]:
        """(format, text) of the grammar, in llguidance's names of formats."""
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        if self.choice is not None:
            return "regex", "|".join(map(re.escape, self.choice))
        return {"json": "json_schema"}.get(self.field, self.field), str(getattr(self, self.field))


def _read_schema(value: Any) -> str:
    if isinstance(value, Mapping):
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            what = "is nested too deep" if isinstance(error, RecursionError) else f"is no JSON: {error}"
            raise ArgumentError(f"structured_outputs.json {what}") from None
    text = _check_text("json", value)
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ArgumentError("structured_outputs.json is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ArgumentError(f"structured_outputs.json is no JSON: {error}") from None
    except ValueError:  # Python's advice is for who writes Python
        raise ArgumentError("structured_outputs.json has a number of thousands of digits") from None
    _check_schema(schema)
    return text


def _check_schema(schema: Any) -> None:
    """Checks a schema's depth and its regexes."""
    left = [(schema, 1)]
    while left:
        value, depth = left.pop()
        if isinstance(value, (dict, list)) and depth > MAX_SCHEMA_DEPTH:
            raise ArgumentError(f"structured_outputs.json is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        if isinstance(value, list):
            left += [(one, depth + 1) for one in value]
        elif isinstance(value, dict):
            for key, one in value.items():
                if key == "pattern" and isinstance(one, str):
                    _check_regex("structured_outputs.json has a pattern that", one)
                elif key == "patternProperties" and isinstance(one, dict):
                    for pattern in one:
                        _check_regex("structured_outputs.json has patternProperties of which one", pattern)
                left += [(one, depth + 1)] if key not in _DATA else []


def _check_regex(what: str, pattern: str) -> None:
    part = find_repeated_repetition(pattern)
    if part is not None:
        short = part if len(part) <= _SHOWN else f"{part[:_SHOWN]}…"
        raise ArgumentError(f"{what} repeats a repetition without bound, {short!r}: write one, as a+ for (a+)+")


def _check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        kinds = "a mapping or its text" if name == "json" else "a text"
        raise ArgumentError(f"structured_outputs.{name} must be {kinds}, got {value!r}")
    if not 0 < len(value) <= MAX_GRAMMAR_LENGTH:
        raise ArgumentError(
            f"structured_outputs.{name} must have 1 to {MAX_GRAMMAR_LENGTH} characters, got {len(value)}"
        )
    try:
        value.encode()
    except UnicodeError as error:  # a lone surrogate
        raise ArgumentError(f"structured_outputs.{name} cannot be encoded as UTF-8: {error}") from None
    return value


def _check_choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise ArgumentError(f"structured_outputs.choice must be a list of texts, got {value!r}")
    choices = tuple(value)
    wrong = next((one for one in choices if not isinstance(one, str) or not one), None)
    if wrong is not None or not 1 <= len(choices) <= MAX_CHOICES:
        raise ArgumentError(
            f"structured_outputs.choice must hold 1 to {MAX_CHOICES} texts that are not empty, "
            f"got {len(choices) if wrong is None else repr(wrong)}"
        )
    _check_text("choice", "".join(choices))
    return choices
