"""The server's histograms beside its client's own clock: p50 and p99 of TTFT, gaps and whole requests.

python -m tests.tsched.serving.histograms FOLDER [--model tiny] [--requests 400] [--at-once 16]

Asked: each falls into the bucket of the client's, or into the next one. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.tsched.serving.raw_http import encode_request
from tests.tsched.serving.tk_serve import Served, serving

MEASURED = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
QUANTILES = (0.5, 0.99)

Buckets = Mapping[str, Sequence[tuple[float, float]]]
"""Histogram -> (upper bound, how many are not above it), in order."""


async def follow(port: int, request: bytes, times: Mapping[str, list[float]]) -> None:
    """Reads one stream, and notes when its events come."""
    began = last = time.perf_counter()
    is_first = True
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            assert b'"error":' not in line, line
            now = time.perf_counter()
            times[MEASURED[0] if is_first else MEASURED[1]].append(now - last)
            last, is_first = now, False
    times[MEASURED[2]].append(time.perf_counter() - began)
    writer.close()


async def load(served: Served, count: int, at_once: int) -> Mapping[str, list[float]]:
    """Seconds that clients measured of so many streams of drawn lengths."""
    draw, times = random.Random(0), {name: [] for name in MEASURED}
    requests = iter(
        [
            encode_request(
                "POST",
                "/v1/completions",
                {
                    "model": "served", "prompt": [draw.randrange(5, 250) for _ in range(draw.randint(1, 100))],
                    "max_tokens": draw.randint(1, 60), "ignore_eos": True, "stream": True,
                },
            )
            for _ in range(count)
        ]
    )  # fmt: skip

    async def client() -> None:
        for request in requests:
            await follow(served.port, request, times)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return times


def read_buckets(served: Served) -> Buckets:
    """The measured histograms as /metrics shows them; without labels, for there is one engine."""
    with urllib.request.urlopen(f"{served.base}/metrics") as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in MEASURED}
    for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
        name = sample.name.removeprefix("vllm:").removesuffix("_bucket")
        if name in found and sample.name.endswith("_bucket"):
            found[name].append((float(sample.labels["le"]), sample.value))
    return found


def compare(before: Buckets, after: Buckets, times: Mapping[str, list[float]]) -> tuple[list[str], list[str]]:
    """(a line for each quantile, what is wrong)."""
    lines, wrong = [], []
    for name in MEASURED:
        bounds = [bound for bound, _ in after[name]]
        zeros = before[name] or [(bound, 0.0) for bound in bounds]
        counts = [now - then for (_, now), (_, then) in zip(after[name], zeros, strict=True)]
        is_gap = name == "inter_token_latency_seconds"  # a chunk may wait for the other half of a character
        if counts[-1] < len(times[name]) or (counts[-1] > len(times[name]) and not is_gap):
            wrong.append(f"{name}: {counts[-1]:.0f} observed, and {len(times[name])} by the clients")
        for quantile in QUANTILES:
            theirs = float(np.quantile(times[name], quantile, method="inverted_cdf"))
            ours = next(place for place, count in enumerate(counts) if count >= quantile * counts[-1])
            line = f"{name} p{100 * quantile:.0f}: {1e3 * theirs:.1f} ms by the clients, <= {1e3 * bounds[ours]:g} ms"
            lines.append(line)
            if abs(bisect_left(bounds, theirs) - ours) > 1:
                wrong.append(line)
    return lines, wrong


def run(served: Served, count: int, at_once: int) -> tuple[list[str], list[str]]:
    """(a line for each quantile, what is wrong)."""
    asyncio.run(load(served, at_once, at_once))  # warm
    before = read_buckets(served)
    times = asyncio.run(load(served, count, at_once))
    return compare(before, read_buckets(served), times)


def main() -> int:
    """1 where a quantile is more than one bucket from the clients'."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=16)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with serving(asked.model, asked.folder) as served:
        lines, wrong = run(served, asked.requests, asked.at_once)
    print("\n".join(lines))
    print(f"load average: {os.getloadavg()[0]:.1f}")
    print("\n".join(f"more than a bucket apart: {line}" for line in wrong) or "all are within one bucket")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
