"""What a line of a trace file says: Azure LLM 2023 CSVs and Mooncake's JSON lines, every field checked and bounded.

What is wrong with a file is an ExperimentError that names the file, the line, what it says and what may be there.
"""

from __future__ import annotations

import csv
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from experiments.document import ExperimentError
from tsched.requests.prompts import MAX_PRIORITY

MOONCAKE_BLOCK = 512
HASH_IDS = 2**32  # there are so many

_MOST_TOKENS = 2**24  # one request's; a longer one is a damaged line
_MOST_SECONDS = 10**9  # from the first request to the last: 31 years
_MOST_TIMESTAMP = 10**15  # milliseconds, since 1970 or since whatever moment
_MOST_BYTES = 2**22  # of a line: as many hash_ids as a request may have are a tenth of that
_NOT_A_ROW = "not a time and two numbers of tokens"
_AN_AZURE_ROW = "a row has TIMESTAMP, ContextTokens, GeneratedTokens"
_A_MOONCAKE_LINE = "a line is an object of timestamp (ms), input_length, output_length, hash_ids"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_A_TIME = "a time is YYYY-MM-DD HH:MM:SS, with up to nine decimals and an offset from UTC, or without"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_Whole = Annotated[int, BeforeValidator(lambda value: int(value) if type(value) is float and value % 1 == 0 else value)]
"""JSON has no integers of its own: 3.0 is 3."""
_Tokens = Annotated[_Whole, Field(ge=1, le=_MOST_TOKENS)]


class _AzureRow(BaseModel):
    time: str = Field(alias="TIMESTAMP")
    input_len: _Tokens = Field(alias="ContextTokens")
    output_len: _Tokens = Field(alias="GeneratedTokens")


class _MooncakeLine(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    timestamp: Annotated[float, Field(ge=0, le=_MOST_TIMESTAMP)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Annotated[int, Field(ge=0, lt=HASH_IDS)]]
    priority: Annotated[_Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0


@dataclass(frozen=True, slots=True)
class Line:
    """arrival: seconds after the first line's. hash_ids: None where the format has none. priority: lower goes first."""

    arrival: float
    input_len: int
    output_len: int
    hash_ids: Sequence[int] | None = None
    priority: int = 0


class _Entry(NamedTuple):
    """A line by itself. `moment`: nanoseconds, since whenever."""

    moment: int
    input_len: int
    output_len: int
    hash_ids: Sequence[int] | None = None
    priority: int = 0


def read_trace(path: Path) -> Iterator[Line]:
    """The requests of a trace one by one, read as its suffix says.

    .csv is Azure's: TIMESTAMP with decimals of a second, ContextTokens, GeneratedTokens. .jsonl is Mooncake's:
    timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens of the prompt, the last may be part of a
    block; equal ids are equal contents after equal prefixes. `priority` may be there too: lower goes first.

    Raises:
        ExperimentError: The suffix is another one, at once; or a line is damaged or none is there, when it is read.
    """
    if path.suffix not in _FORMATS:
        raise ExperimentError([f"{path}: the format follows from the suffix, .csv (Azure) or .jsonl (Mooncake)"])
    return _read(path, _FORMATS[path.suffix])


def _read(path: Path, parse: Callable[[Iterator[str]], Iterator[_Entry]]) -> Iterator[Line]:
    lines = _Lines(path)
    first: int | None = None
    last = 0.0
    try:
        for entry in parse(iter(lines)):
            if entry.input_len + entry.output_len > _MOST_TOKENS:
                got = f"got {entry.input_len} and {entry.output_len}"
                raise ValueError(f"a request may have {_MOST_TOKENS:,} tokens in and out, at most, {got}")
            first = entry.moment if first is None else first
            arrival = (entry.moment - first) / 10**9
            if arrival < last:
                raise ValueError("arrives before the request above it; sort the file by time")
            if arrival > _MOST_SECONDS:
                raise ValueError(f"arrives {arrival:,.0f} s after the first request; {_MOST_SECONDS:,} s is the most")
            yield Line(arrival, *entry[1:])
            last = arrival
    except ValueError as error:
        raise ExperimentError([f"{path}, line {lines.number}: {error}"]) from None
    if first is None:
        raise ExperimentError([f"{path.name}: holds no request"])


class _Lines:
    """A file's lines but for blank ones. `number`: of the last one that was read, from 1."""

    def __init__(self, path: Path) -> None:
        self.number = 1
        self._path = path

    def __iter__(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            for self.number, raw in enumerate(iter(lambda: file.readline(_MOST_BYTES + 1), b""), 1):
                if len(raw) > _MOST_BYTES:
                    raise ValueError(f"is longer than the {_MOST_BYTES:,} bytes that a line may have")
                try:
                    text = raw.decode("utf-8-sig" if self.number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    found = f"byte {error.start + 1} is 0x{raw[error.start]:02x}"
                    raise ValueError(f"{found}, which is not UTF-8; a trace is UTF-8 text") from None
                if text.strip():
                    yield text


def _parse_azure(lines: Iterator[str]) -> Iterator[_Entry]:
    header = _split_fields(next(lines, ""))
    if missing := [f"{field.alias}" for field in _AzureRow.model_fields.values() if field.alias not in header]:
        raise ValueError(f"has no column {missing[0]}; {_AN_AZURE_ROW}")
    first_has_offset: bool | None = None
    for text in lines:
        fields = _split_fields(text)
        if len(fields) != len(header):
            raise ValueError(f"{_NOT_A_ROW}: {len(fields)} fields, where the header has {len(header)}")
        try:
            row = _AzureRow.model_validate(dict(zip(header, fields, strict=True)))
        except ValidationError as error:
            raise ValueError(_explain(error, _AN_AZURE_ROW)) from None
        moment, has_offset = _parse_time(row.time)
        if first_has_offset is None:
            first_has_offset = has_offset
        if has_offset != first_has_offset:
            words = ("an offset", "none") if has_offset else ("no offset", "one")
            raise ValueError(f"this time has {words[0]} from UTC and the first has {words[1]}: all may have, or none")
        yield _Entry(moment, row.input_len, row.output_len)


def _split_fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"{_NOT_A_ROW}: {error}; {_AN_AZURE_ROW}") from None


def _parse_time(text: str) -> tuple[int, bool]:
    """Nanoseconds since 1970, of which a datetime would cut off the seventh decimal; whether an offset is there."""
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        second, decimals, offset = match.groups()
        whole = datetime.fromisoformat(second + (offset or "Z")) - _EPOCH
    except ValueError:
        raise ValueError(f"{_NOT_A_ROW}: TIMESTAMP is {_shorten(text)}; {_A_TIME}") from None
    return whole // timedelta(seconds=1) * 10**9 + int((decimals or "0").ljust(9, "0")), offset is not None


def _parse_mooncake(lines: Iterator[str]) -> Iterator[_Entry]:
    for text in lines:
        try:
            line = _MooncakeLine.model_validate_json(text.rstrip())
        except ValidationError as error:
            raise ValueError(_explain(error, _A_MOONCAKE_LINE)) from None
        wanted = -(-line.input_length // MOONCAKE_BLOCK)
        if len(line.hash_ids) != wanted:
            blocks = f"{len(line.hash_ids):,} blocks of {MOONCAKE_BLOCK}"
            raise ValueError(f"{line.input_length:,} tokens are not {blocks}: hash_ids must hold {wanted:,}")
        moment = int(line.timestamp) * 10**6 + round(line.timestamp % 1 * 10**6)
        yield _Entry(moment, line.input_length, line.output_length, line.hash_ids, line.priority)


_FORMATS: Mapping[str, Callable[[Iterator[str]], Iterator[_Entry]]] = {".csv": _parse_azure, ".jsonl": _parse_mooncake}


def _explain(error: ValidationError, form: str) -> str:
    """The first of its problems, with what was found and what a line has."""
    problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":
        return f"{problem['ctx']['error'].replace('line 1 ', '')}; {form}"
    name, *index = problem["loc"] or ("",)
    if problem["type"] == "missing":
        return f"has no {name!r}; {form}"
    if not name:
        return f"is {_shorten(problem['input'])}; {form}"
    field = f"{name}[{index[0]}]" if index else name
    return f"{field} {problem['msg'].replace('Input should', 'must')}, got {_shorten(problem['input'])}; {form}"


def _shorten(value: Any) -> str:
    """As Python writes it, cut where it is long: a message is one line."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    return reprlib.repr(value)
