"""Requests, one at a time: of trace files, and of a generator.

A trace holds no text. Prompts are made of runs of equal tokens, so that two prompts agree exactly where the trace says
that they do; they are made when the scheduler is about to see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experiments.document import ExperimentError
from experiments.simulation.trace_files import HASH_IDS, MOONCAKE_BLOCK, read_trace

# Three ranges of token values: contents that a trace names, prompts that are nobody else's, and sampled tokens.
PRIVATE_TOKENS = HASH_IDS
OUTPUT_TOKENS = 2**48

_PAGE = 16  # where a trace's own contents have no blocks
_MOST_SYNTHETIC = 10**9  # requests
_MOST_LEVELS = 10**6


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
    """The trace in the file `name`, `synthetic:N` or `synthetic:N:P`; ExperimentError where it is none of them."""
    kind, colon, numbers = name.partition(":")
    if kind == "synthetic" and colon:
        count, more, levels = numbers.partition(":")
        number = _synthetic_number(name, "a number of requests N", count, _MOST_SYNTHETIC)
        num_levels = _synthetic_number(name, "a number of priorities P", levels, _MOST_LEVELS) if more else 1
        return Trace(name, _PAGE, lambda: _synthetic(number, num_levels))
    path = Path(name)
    if not path.is_file():
        raise ExperimentError([f"--trace {name}: no such file; give a .csv, a .jsonl or synthetic:N"])
    read_trace(path)  # another suffix is refused now, and not with the first request
    return Trace(name, MOONCAKE_BLOCK if path.suffix == ".jsonl" else _PAGE, lambda: _read_requests(path))


def _synthetic_number(name: str, what: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 1 <= int(text) <= most):
        message = f"synthetic:N, or synthetic:N:P, needs {what} >= 1, at most {most:,}, got {text[:30]!r}"
        raise ExperimentError([f"--trace {name[:50]}: {message}"])
    return int(text)


def limit_requests(trace: Trace, limit: int | None) -> Trace:
    """The first `limit` requests of `trace`."""
    return trace if limit is None else replace(trace, requests=lambda: islice(trace.requests(), limit))


def speed_up(trace: Trace, factor: float) -> Trace:
    """`trace` with its arrivals `factor` times as dense."""
    return replace(trace, requests=lambda: (replace(r, arrival=r.arrival / factor) for r in trace.requests()))


def measure_extent(trace: Trace, page_sizes: Sequence[int]) -> Extent:
    """One pass over `trace`."""
    count, arrival, longest = 0, 0.0, 0
    num_blocks = dict.fromkeys(page_sizes, 0)
    for request in trace.requests():
        total = request.input_len + request.output_len
        count += 1
        arrival = request.arrival
        longest = max(longest, total)
        for size in num_blocks:
            num_blocks[size] += -(-total // size)
    return Extent(count, arrival, longest, num_blocks)


def bound_hit_rate(trace: Trace, page_size: int) -> float:
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


def _read_requests(path: Path) -> Iterator[Request]:
    """Where the format names no contents, prompts share nothing."""
    for id, line in enumerate(read_trace(path)):
        contents, length = (line.hash_ids, MOONCAKE_BLOCK) if line.hash_ids else ([PRIVATE_TOKENS + id], line.input_len)
        yield Request(id, line.arrival, line.input_len, line.output_len, contents, length, line.priority)


def _synthetic(count: int, num_levels: int) -> Iterator[Request]:
    """`count` requests, always the same: Poisson arrivals, 8 a second; log-normal lengths, in the mean about 1,000
    tokens in and 200 out; three in four begin with one of 1,000 shared texts, the k-th with a weight of 1 / k.
    Priorities are drawn from 0 to `num_levels` - 1, by a generator of their own: the rest stays as it is without.
    """
    rng, level_rng = np.random.default_rng(0), np.random.default_rng(1)
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
        levels = level_rng.integers(0, num_levels, chunk)
        facts = (column[:size].tolist() for column in (arrivals, own, outputs, texts, shared, levels))
        for id, (moment, own_len, output_len, text, shared_len, level) in enumerate(zip(*facts, strict=True), start):
            contents, lengths = (text, PRIVATE_TOKENS + id), (shared_len, own_len)
            yield Request(id, moment, shared_len + own_len, output_len, contents, lengths, level)
