"""Requests, one at a time: the Azure LLM 2023 CSVs, Mooncake's JSON lines, and a generator.

A trace holds no text. Prompts are made of runs of equal tokens, so that two prompts agree exactly where the trace says
that they do; they are made when the scheduler is about to see them.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.document import ExperimentError

# Three ranges of token values: contents that a trace names, prompts that are nobody else's, and sampled tokens.
PRIVATE_TOKENS = 2**32
OUTPUT_TOKENS = 2**48

MOONCAKE_BLOCK = 512
_SYNTHETIC_PAGE = 16
_MOST_TOKENS = 2**24  # one request's; a longer one is a damaged line
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Request:
    """arrival: seconds from the trace's start. The prompt is `contents[i]` repeated `lengths[i]` times, for all i, cut
    at `input_len` tokens; `lengths` may be one number for all. priority: lower goes first.
    """

    id: int
    arrival: float
    input_len: int
    output_len: int
    contents: Sequence[int]
    lengths: Sequence[int] | int
    priority: int = 0

    def prompt(self) -> NDArray[np.int64]:
        """[input_len] int64, the prompt's token ids."""
        return np.repeat(np.array(self.contents, dtype=np.int64), self.lengths)[: self.input_len]


@dataclass(frozen=True)
class Trace:
    """`requests()` reads from the start, in the order of arrival. page_size: the one that its contents are cut at."""

    name: str
    page_size: int
    requests: Callable[[], Iterator[Request]]


@dataclass(frozen=True)
class Extent:
    """What one pass over a trace tells.

    longest: most tokens of one request, prompt and output. num_blocks: by page size, the blocks that all requests'
    prompts and outputs fill where none is shared.
    """

    num_requests: int
    last_arrival: float
    longest: int
    num_blocks: dict[int, int]


def open_trace(name: str) -> Trace:
    """The trace in the file `name`, or `synthetic:N`; ExperimentError where it is neither."""
    kind, colon, count = name.partition(":")
    if kind == "synthetic" and colon:
        if not count.isdecimal() or int(count) < 1:
            raise ExperimentError([f"--trace {name}: synthetic:N needs a number of requests N >= 1, got {count!r}"])
        return Trace(name, _SYNTHETIC_PAGE, lambda: _synthetic(int(count)))
    path = Path(name)
    if not path.is_file():
        raise ExperimentError([f"--trace {name}: no such file; give a .csv, a .jsonl or synthetic:N"])
    if path.suffix == ".csv":
        return Trace(name, _SYNTHETIC_PAGE, lambda: _ordered(path, _azure(path)))
    if path.suffix == ".jsonl":
        return Trace(name, MOONCAKE_BLOCK, lambda: _ordered(path, _mooncake(path)))
    raise ExperimentError([f"--trace {name}: the format follows from the suffix, .csv (Azure) or .jsonl (Mooncake)"])


def limited(trace: Trace, limit: int | None) -> Trace:
    """The first `limit` requests of `trace`."""
    return trace if limit is None else replace(trace, requests=lambda: islice(trace.requests(), limit))


def sped_up(trace: Trace, factor: float) -> Trace:
    """`trace` with its arrivals `factor` times as dense."""
    return replace(trace, requests=lambda: (replace(r, arrival=r.arrival / factor) for r in trace.requests()))


def extent_of(trace: Trace, page_sizes: Sequence[int]) -> Extent:
    """One pass over `trace`; ExperimentError where it holds no request."""
    count, arrival, longest = 0, 0.0, 0
    num_blocks = dict.fromkeys(page_sizes, 0)
    for request in trace.requests():
        total = request.input_len + request.output_len
        count += 1
        arrival = request.arrival
        longest = max(longest, total)
        for size in num_blocks:
            num_blocks[size] += -(-total // size)
    if count == 0:
        raise ExperimentError([f"--trace {trace.name}: holds no request"])
    return Extent(count, arrival, longest, num_blocks)


def prefix_bound(trace: Trace, page_size: int) -> float:
    """The share of the prompts' blocks that an unbounded cache could give, each request served before the next comes.

    A block counts where it and all before it in its prompt were in an earlier prompt; a prompt's last block counts
    among the wanted ones however full it is, but only full ones are ever given, and never the one that holds the last
    token: something has to be computed.
    """
    seen: set[int] = set()
    hits = wanted = 0
    for request in trace.requests():
        prompt = request.prompt()
        wanted += -(-prompt.size // page_size)
        digest, goes_on = 0, True
        for end in range(page_size, prompt.size + 1, page_size):
            digest = hash((digest, prompt[end - page_size : end].tobytes()))
            goes_on = goes_on and digest in seen and end < prompt.size
            hits += goes_on
            seen.add(digest)
    return hits / wanted


def _ordered(path: Path, requests: Iterator[tuple[int, Request]]) -> Iterator[Request]:
    """Checks what both formats ask of a request; `requests` come with their line numbers."""
    last = 0.0
    for line, request in requests:
        if request.input_len < 1 or request.output_len < 1:
            raise _wrong(path, line, "a request needs at least one token in and one out")
        if request.input_len + request.output_len > _MOST_TOKENS:
            raise _wrong(path, line, f"a request may have {_MOST_TOKENS:,} tokens in and out, at most")
        if request.arrival < last:
            raise _wrong(path, line, "arrives before the request above it; sort the file by time")
        last = request.arrival
        yield request


def _azure(path: Path) -> Iterator[tuple[int, Request]]:
    """TIMESTAMP with seven decimals of a second, ContextTokens, GeneratedTokens. Prompts share nothing."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        missing = [name for name in _AZURE_COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise _wrong(path, 1, f"has no column {missing[0]}; an Azure trace has {', '.join(_AZURE_COLUMNS)}")
        first: datetime | None = None
        offset = 0.0
        for id, row in enumerate(rows):
            try:
                whole, _, decimals = row["TIMESTAMP"].partition(".")
                moment = datetime.fromisoformat(whole)
                fraction = float(f"0.{decimals or 0}")
                input_len, output_len = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (ValueError, TypeError):
                raise _wrong(path, rows.line_num, f"not a time and two numbers of tokens: {row}") from None
            if first is None:
                first, offset = moment, fraction
            arrival = (moment - first).total_seconds() + fraction - offset
            yield rows.line_num, Request(id, arrival, input_len, output_len, (PRIVATE_TOKENS + id,), input_len)


def _mooncake(path: Path) -> Iterator[tuple[int, Request]]:
    """timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens of the prompt, the last may be part of
    a block; equal ids are equal contents after equal prefixes. `priority` may be there too: lower goes first.
    """
    first: float | None = None
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            try:
                entry = json.loads(text)
                numbers = [_number(entry, key) for key in _MOONCAKE_KEYS[:3]]
                ids = entry["hash_ids"]
                if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < PRIVATE_TOKENS for i in ids):
                    raise ValueError("hash_ids must be a list of integers from 0 to 2**32 - 1")
                priority = _number(entry, "priority") if "priority" in entry else 0
            except (ValueError, TypeError, KeyError) as error:
                reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
                raise _wrong(path, line, f"{reason}; a line is an object of {', '.join(_MOONCAKE_KEYS)}") from None
            input_len = int(numbers[1])
            if len(ids) != -(-input_len // MOONCAKE_BLOCK):
                raise _wrong(path, line, f"{input_len} tokens are not {len(ids)} blocks of {MOONCAKE_BLOCK}")
            if first is None:
                first = numbers[0]
            arrival = (numbers[0] - first) / 1e3
            yield line, Request(line - 1, arrival, input_len, int(numbers[2]), ids, MOONCAKE_BLOCK, int(priority))


def _number(entry: Any, key: str) -> float:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {value!r}")
    if key != "timestamp" and value != int(value):
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    return value


def _wrong(path: Path, line: int, message: str) -> ExperimentError:
    return ExperimentError([f"{path}, line {line}: {message}"])


def _synthetic(count: int) -> Iterator[Request]:
    """`count` requests, always the same: Poisson arrivals, 8 a second; log-normal lengths, in the mean about 1,000
    tokens in and 200 out; three in four begin with one of 1,000 shared texts, the k-th with a weight of 1 / k.
    """
    rng = np.random.default_rng(0)
    num_texts, chunk = 1000, 4096
    text_lens = rng.integers(128, 1024, num_texts)
    weights = 1.0 / np.arange(1, num_texts + 1)
    cumulative = np.cumsum(weights / weights.sum())
    arrival = 0.0
    for start in range(0, count, chunk):
        size = min(chunk, count - start)
        arrivals = arrival + np.cumsum(rng.exponential(1 / 8, chunk))
        own = np.clip(rng.lognormal(5.9, 0.9, chunk), 1, 8192).astype(np.int64)
        outputs = np.clip(rng.lognormal(4.9, 0.9, chunk), 1, 1000).astype(np.int64)
        texts = np.minimum(np.searchsorted(cumulative, rng.random(chunk)), num_texts - 1)
        shared = np.where(rng.random(chunk) < 0.75, text_lens[texts], 0)
        arrival = float(arrivals[-1])
        facts = (column[:size].tolist() for column in (arrivals, own, outputs, texts, shared))
        for id, (moment, own_len, output_len, text, shared_len) in enumerate(zip(*facts, strict=True), start):
            contents, lengths = (text, PRIVATE_TOKENS + id), (shared_len, own_len)
            yield Request(id, moment, shared_len + own_len, output_len, contents, lengths)
