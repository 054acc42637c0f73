"""What a line of a trace file says: Azure LLM 2023 CSVs and Mooncake's JSON lines, every field checked and bounded.

What is wrong with a file is an ExperimentError that names the file, the line, what it says and what may be there.
"""

from __future__ import annotations

import csv
import json
import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.document import ExperimentError
from tsched.requests.prompts import MAX_PRIORITY

MOONCAKE_BLOCK = 512
HASH_IDS = 2**32  # there are so many

_MOST_TOKENS = 2**24  # one request's; a longer one is a damaged line
_MOST_SECONDS = 10**9  # from the first request to the last: 31 years
_MOST_TIMESTAMP = 10**15  # milliseconds, since 1970 or since whatever moment
_MOST_BYTES = 2**22  # of a line: as many hash_ids as a request may have are a tenth of that
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_A_MOONCAKE_LINE = f"a line is an object of {', '.join(_MOONCAKE_KEYS)}"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_A_TIME = "a time is YYYY-MM-DD HH:MM:SS, with up to nine decimals and an offset from UTC, or without"


@dataclass(frozen=True, slots=True)
class Line:
    """arrival: seconds after the first line's. hash_ids: None where the format has none. priority: lower goes first."""

    arrival: float
    input_len: int
    output_len: int
    hash_ids: Sequence[int] | None = None
    priority: int = 0


def read_azure(path: Path) -> Iterator[Line]:
    """TIMESTAMP with decimals of a second, ContextTokens, GeneratedTokens."""
    lines = _lines(path)
    number, text = next(lines, (1, ""))
    try:
        header = _split_fields(text)
        missing = [name for name in _AZURE_COLUMNS if name not in header]
        if missing:
            raise ValueError(f"has no column {missing[0]}; an Azure trace has {', '.join(_AZURE_COLUMNS)}")
    except ValueError as error:
        raise _line_error(path, number, str(error)) from None
    places = [header.index(name) for name in _AZURE_COLUMNS]
    first: tuple[datetime, float] | None = None
    last = 0.0
    for number, text in lines:
        if not text.strip():
            continue
        try:
            row = _split_fields(text)
            if len(row) != len(header):
                raise ValueError(f"{_NOT_A_ROW}: {len(row)} fields, where the header has {len(header)}")
            moment, fraction = _parse_time(row[places[0]])
            input_len, output_len = (_parse_count(_AZURE_COLUMNS[i], row[places[i]]) for i in (1, 2))
            _check_tokens(input_len, output_len)
            if first is None:
                first = moment, fraction
            if (moment.tzinfo is None) != (first[0].tzinfo is None):
                words = ("no offset", "one") if moment.tzinfo is None else ("an offset", "none")
                raise ValueError(
                    f"this time has {words[0]} from UTC and the first has {words[1]}: all may have, or none"
                )
            arrival = (moment - first[0]).total_seconds() + fraction - first[1]
            _check_arrival(arrival, last)
        except ValueError as error:
            raise _line_error(path, number, str(error)) from None
        last = arrival
        yield Line(arrival, input_len, output_len)


def read_mooncake(path: Path) -> Iterator[Line]:
    """timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens of the prompt, the last may be part of
    a block; equal ids are equal contents after equal prefixes. `priority` may be there too: lower goes first.
    """
    first: float | None = None
    last = 0.0
    for number, text in _lines(path):
        if not text.strip():
            continue
        try:
            entry = _parse_object(text)
            timestamp = _read_number(entry, "timestamp", f"milliseconds from 0 to {_MOST_TIMESTAMP:,}")
            if not 0 <= timestamp <= _MOST_TIMESTAMP:
                raise ValueError(f"timestamp must be from 0 to {_MOST_TIMESTAMP:,} ms, got {_shorten(timestamp)}")
            input_len, output_len = (_read_whole_number(entry, key, 1, _MOST_TOKENS) for key in _MOONCAKE_KEYS[1:3])
            _check_tokens(input_len, output_len)
            ids = _read_hash_ids(entry, input_len)
            priority = _read_priority(entry) if "priority" in entry else 0
            if first is None:
                first = timestamp
            arrival = (timestamp - first) / 1e3
            _check_arrival(arrival, last)
        except ValueError as error:
            raise _line_error(path, number, str(error)) from None
        last = arrival
        yield Line(arrival, input_len, output_len, ids, priority)


def trace_lines(path: Path) -> list[Line]:
    """All lines of a trace, read as its suffix says."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ExperimentError([f"{path.name}: the format follows from the suffix, .csv (Azure) or .jsonl (Mooncake)"])
    lines = list(read_mooncake(path) if path.suffix == ".jsonl" else read_azure(path))
    if not lines:
        raise ExperimentError([f"{path.name}: holds no request"])
    return lines


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Each line with its number, from 1."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(_MOST_BYTES + 1):
            number += 1
            if len(raw) > _MOST_BYTES:
                raise _line_error(path, number, f"is longer than the {_MOST_BYTES:,} bytes that a line may have")
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = (
                    f"byte {error.start + 1} is 0x{raw[error.start]:02x}, which is not UTF-8; a trace is UTF-8 text"
                )
                raise _line_error(path, number, message) from None


_NOT_A_ROW = "not a time and two numbers of tokens"


def _split_fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text.rstrip("\r\n")], strict=True), [])
    except csv.Error as error:
        raise ValueError(f"{_NOT_A_ROW}: {error}; a row has {', '.join(_AZURE_COLUMNS)}") from None


def _parse_time(text: str) -> tuple[datetime, float]:
    """The whole second, and its fraction: a datetime alone would cut off the seventh decimal."""
    match = _TIME.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        return datetime.fromisoformat(match[1] + (match[3] or "")), float(f"0{match[2] or ''}")
    except ValueError:
        raise ValueError(f"{_NOT_A_ROW}: TIMESTAMP is {_shorten(text)}; {_A_TIME}") from None


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
    for key in _MOONCAKE_KEYS:
        if key not in entry:
            raise ValueError(f"has no {key!r}; {_A_MOONCAKE_LINE}")
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
        raise ValueError(
            f"{input_len:,} tokens are not {len(ids):,} blocks of {MOONCAKE_BLOCK}: hash_ids must hold {wanted:,}"
        )
    return ids


def _check_tokens(input_len: int, output_len: int) -> None:
    got = f"got {_shorten(input_len)} and {_shorten(output_len)}"
    if input_len < 1 or output_len < 1:
        raise ValueError(f"a request needs at least one token in and one out, {got}")
    if input_len + output_len > _MOST_TOKENS:
        raise ValueError(f"a request may have {_MOST_TOKENS:,} tokens in and out, at most, {got}")


def _check_arrival(arrival: float, last: float) -> None:
    if arrival < last:
        raise ValueError("arrives before the request above it; sort the file by time")
    if arrival > _MOST_SECONDS:
        raise ValueError(f"arrives {arrival:,.0f} s after the first request; {_MOST_SECONDS:,} s is the most")


def _shorten(value: Any) -> str:
    """As Python writes it, cut where it is long: a message is one line."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a number of more than 30 digits"
    return reprlib.repr(value)


def _line_error(path: Path, line: int, message: str) -> ExperimentError:
    return ExperimentError([f"{path}, line {line}: {message}"])
