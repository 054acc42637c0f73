"""What a line of a trace file says: Azure LLM 2023 CSVs and Mooncake's JSON lines, every field checked and bounded.

What is wrong with a file is an ExperimentError that names the file, the line, what it says and what may be there.
"""

from __future__ import annotations

import csv
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from experiments.document import ExperimentError
from tsched.requests.prompts import MAX_PRIORITY

MOONCAKE_BLOCK = 512
HASH_IDS = 2**32  # there are so many

_MOST_TOKENS = 2**24  # one request's; a longer one is a damaged line
_MOST_SECONDS = 10**9  # from the first request to the last: 31 years
_MOST_TIMESTAMP = 10**15  # milliseconds, since 1970 or since whatever moment
_MOST_BYTES = 2**22  # of a line: as many hash_ids as a request may have are a tenth of that
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NOT_A_ROW = "not a time and two numbers of tokens"
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_A_MOONCAKE_LINE = f"a line is an object of {', '.join(_MOONCAKE_KEYS)}"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_A_TIME = "a time is YYYY-MM-DD HH:MM:SS, with up to nine decimals and an offset from UTC, or without"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
    if missing := [name for name in _AZURE_COLUMNS if name not in header]:
        raise ValueError(f"has no column {missing[0]}; an Azure trace has {', '.join(_AZURE_COLUMNS)}")
    first_has_offset: bool | None = None
    for text in lines:
        fields = _split_fields(text)
        if len(fields) != len(header):
            raise ValueError(f"{_NOT_A_ROW}: {len(fields)} fields, where the header has {len(header)}")
        row = dict(zip(header, fields, strict=True))
        moment, has_offset = _parse_time(row["TIMESTAMP"])
        input_len, output_len = (_parse_count(name, row[name]) for name in _AZURE_COLUMNS[1:])
        _check_tokens(input_len, output_len)
        if first_has_offset is None:
            first_has_offset = has_offset
        if has_offset != first_has_offset:
            words = ("an offset", "none") if has_offset else ("no offset", "one")
            raise ValueError(f"this time has {words[0]} from UTC and the first has {words[1]}: all may have, or none")
        yield _Entry(moment, input_len, output_len)


def _parse_mooncake(lines: Iterator[str]) -> Iterator[_Entry]:
    for text in lines:
        entry = _parse_object(text)
        timestamp = _read_number(entry, "timestamp", f"milliseconds from 0 to {_MOST_TIMESTAMP:,}")
        if not 0 <= timestamp <= _MOST_TIMESTAMP:
            raise ValueError(f"timestamp must be from 0 to {_MOST_TIMESTAMP:,} ms, got {_shorten(timestamp)}")
        input_len, output_len = (_read_whole_number(entry, key, 1, _MOST_TOKENS) for key in _MOONCAKE_KEYS[1:3])
        _check_tokens(input_len, output_len)
        hash_ids = _read_hash_ids(entry, input_len)
        yield _Entry(round(timestamp * 10**6), input_len, output_len, hash_ids, _read_priority(entry))


_FORMATS: Mapping[str, Callable[[Iterator[str]], Iterator[_Entry]]] = {".csv": _parse_azure, ".jsonl": _parse_mooncake}


def _split_fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"{_NOT_A_ROW}: {error}; a row has {', '.join(_AZURE_COLUMNS)}") from None


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


def _parse_count(name: str, text: str) -> int:
    digits = text.strip()
    if not re.fullmatch(r"-?\d{1,30}", digits, re.ASCII):
        raise ValueError(f"{_NOT_A_ROW}: {name} is {_shorten(text)}; it is a whole number from 1 to {_MOST_TOKENS:,}")
    return int(digits)


def _parse_object(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (column {error.colno}); {_A_MOONCAKE_LINE}") from None
    except ValueError:  # an integer of more digits than Python reads
        raise ValueError(f"holds a number of thousands of digits; {_A_MOONCAKE_LINE}") from None
    except RecursionError:
        raise ValueError(f"is nested too deeply; {_A_MOONCAKE_LINE}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"is {_shorten(entry)}; {_A_MOONCAKE_LINE}")
    if missing := [key for key in _MOONCAKE_KEYS if key not in entry]:
        raise ValueError(f"has no {missing[0]!r}; {_A_MOONCAKE_LINE}")
    return entry


def _read_number(entry: dict[str, Any], key: str, allowed: str) -> float:
    """Not asked with math.isfinite: an integer may be too large for a float."""
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
        raise ValueError(f"{key} must be a finite number, got {_shorten(value)}; it is {allowed}")
    return value


def _read_whole_number(entry: dict[str, Any], key: str, low: int, high: int) -> int:
    """A whole number; whether it is within `low` and `high` is for the caller to say."""
    allowed = f"a whole number from {low:,} to {high:,}"
    value = _read_number(entry, key, allowed)
    if value != int(value):
        raise ValueError(f"{key} must be {allowed}, got {_shorten(value)}")
    return int(value)


def _read_priority(entry: dict[str, Any]) -> int:
    if "priority" not in entry:
        return 0
    value = _read_whole_number(entry, "priority", -MAX_PRIORITY, MAX_PRIORITY)
    if abs(value) > MAX_PRIORITY:
        raise ValueError(f"priority must be from {-MAX_PRIORITY:,} to {MAX_PRIORITY:,}, got {_shorten(value)}")
    return value


def _read_hash_ids(entry: dict[str, Any], input_len: int) -> list[int]:
    ids = entry["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < HASH_IDS for i in ids):
        raise ValueError(f"hash_ids must be a list of integers from 0 to 2**32 - 1, got {_shorten(ids)}")
    wanted = -(-input_len // MOONCAKE_BLOCK)
    if len(ids) != wanted:
        blocks = f"{len(ids):,} blocks of {MOONCAKE_BLOCK}"
        raise ValueError(f"{input_len:,} tokens are not {blocks}: hash_ids must hold {wanted:,}")
    return ids


def _check_tokens(input_len: int, output_len: int) -> None:
    got = f"got {_shorten(input_len)} and {_shorten(output_len)}"
    if input_len < 1 or output_len < 1:
        raise ValueError(f"a request needs at least one token in and one out, {got}")
    if input_len + output_len > _MOST_TOKENS:
        raise ValueError(f"a request may have {_MOST_TOKENS:,} tokens in and out, at most, {got}")


def _shorten(value: Any) -> str:
    """As Python writes it, cut where it is long: a message is one line."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    return reprlib.repr(value)
