"""Many streams at once: does each have the whole text of `LLM.generate`, and what does the server need for them?

python -m tests.tsched.serving.many_streams FOLDER [--model tiny] [--streams 2000] [--seconds 0] [--rows 64]

Each client asks for one stream after another, greedily, until `--seconds` are over, and for one at least; all connect
at once. The server's limits are raised by its options as far as so many need. Asked: no error, and every text is
LLM.generate's. Printed: streams, tokens a second, memory and open files of the front end and of the worker before, at
their highest, and after. FOLDER keeps the server's log.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.tsched.serving.raw_http import ask, encode_request
from tests.tsched.serving.soak import find_grown, find_sizes
from tests.tsched.serving.tk_serve import Served, count_files, memory, serving
from tsched import LLM, SamplingParams

NUM_PROMPTS, NUM_TOKENS = 40, 32
PARAMS = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@dataclass
class Crowd:
    """What many clients saw.

    Attributes:
        texts: (prompt, text) -> how many streams had it.
        faults: Streams that did not end whole.
        most: What -> the highest that it was.
    """

    texts: Counter[tuple[int, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    most: Counter[str] = field(default_factory=Counter)


def draw_prompts() -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(5, 250) for _ in range(draw.randrange(4, 40))] for _ in range(NUM_PROMPTS)]


def find_use(served: Served) -> Counter[str]:
    """Memory in MB and open files of both processes."""
    found: Counter[str] = Counter()
    for name, pid in (("front end", served.pid), ("worker", served.find_worker())):
        found[f"MB of the {name}"] = memory(pid) // 1_000_000
        found[f"files of the {name}"] = count_files(pid)
    return found


async def follow(served: Served, crowd: Crowd, requests: list[bytes], index: int, until: float) -> None:
    """One stream after another of one client."""
    while True:
        place = index % len(requests)
        answer = await ask(served.port, requests[place])
        if answer.is_done and answer.error is None:
            crowd.texts[place, answer.text] += 1
        else:
            crowd.faults.append(f"{answer.status} {answer.body[-200:]!r}")
        index += 1
        if time.monotonic() >= until:
            return


async def watch(served: Served, crowd: Crowd) -> None:
    """Notes the highest use, four times a second, until it is cancelled."""
    while True:
        crowd.most |= find_use(served) | Counter({"streams at once": served.load()["in_flight"]})
        await asyncio.sleep(0.25)


async def follow_all(served: Served, num_streams: int, seconds: float) -> Crowd:
    crowd, bodies = Crowd(), [{"model": "served", "prompt": one, "stream": True, **PARAMS} for one in draw_prompts()]
    requests = [encode_request("POST", "/v1/completions", body) for body in bodies]
    until = time.monotonic() + seconds
    watching = asyncio.create_task(watch(served, crowd))
    await asyncio.gather(*(follow(served, crowd, requests, index, until) for index in range(num_streams)))
    watching.cancel()
    return crowd


def find_wrong(crowd: Crowd, directory: Path) -> list[str]:
    """The texts that are not LLM.generate's, and the streams that did not end whole."""
    llm = LLM(directory, prefix_cache="none")
    whole = llm.generate(draw_prompts(), SamplingParams(**PARAMS), use_tqdm=False)
    expected = [one.outputs[0].text for one in whole]
    return crowd.faults + [
        f"{count} streams of prompt {place} had {text!r}, and LLM.generate has {expected[place]!r}"
        for (place, text), count in crowd.texts.items()
        if text != expected[place]
    ]


def run(model: str, folder: Path, num_streams: int, seconds: float, rows: int) -> list[str]:
    """What is wrong; the figures are printed."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the server's, too
    options = ["--max-in-flight", str(num_streams), "--max-waiting-tokens", str(100 * num_streams)]
    options += ["--queue-timeout", "600", "--max-num-seqs", str(rows), "--prefix-cache", "none"]
    with serving(model, folder, options) as served:
        asyncio.run(follow_all(served, 4, 0.0))  # warm
        before, sizes = find_use(served), find_sizes(served)
        start, counted = time.perf_counter(), served.count()
        crowd = asyncio.run(follow_all(served, num_streams, seconds))
        took = time.perf_counter() - start
        counted = served.count() - counted
        grown, after = find_grown(served, sizes), find_use(served)
        wrong = find_wrong(crowd, served.directory) + grown
    num_ended = sum(crowd.texts.values())
    if counted["vllm:request_success_total"] != num_ended or counted["tkernels_requests_refused_total"]:
        wrong.append(f"{num_ended} streams ended, and the server counts {dict(counted)}")
    rate, most = counted["vllm:generation_tokens_total"] / took, crowd.most["streams at once"]
    print(f"{num_streams} clients, {most} streams at once: {num_ended} ended whole in {took:.0f} s, and")
    print(f"{len(crowd.faults)} did not; {rate:,.0f} tokens a second")
    for name, value in before.items():
        print(f"{name}: {value} before, {crowd.most[name]} at most, {after[name]} after")
    return wrong


def main() -> int:
    """1 where a stream is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--rows", type=int, default=64)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    wrong = run(asked.model, asked.folder, asked.streams, asked.seconds, asked.rows)
    print("\n".join(wrong[:10]) or "nothing is wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
