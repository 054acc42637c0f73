"""Our scheduler and nano-vllm's in one run, in turn, through the same arrivals and finishes, short outputs and long.

python -m tests.bench.beside_nano_vllm PATH/TO/nano-vllm [--turns 60] [--rounds 5] [--mix 128:2-64]

The path is a checkout of github.com/GeeeekExplorer/nano-vllm, of which only the scheduler is loaded; it needs xxhash.
256 sequences run in a pool for 256 of 2,048 tokens; as one finishes another comes, and no two prompts are alike. Timed,
in the thread's CPU time, are add, schedule, and commit or postprocess. That scheduler runs prompts in steps of their
own, so the two are compared by what a token costs: in a turn each takes steps until it has brought 256 tokens.

Not all of this is the same work. That scheduler always keeps prefixes, as `hash` and `radix` do here: it digests each
whole block once, in xxHash64 without a secret, and compares tokens at a hit. `none` here does none of it. Ours also
checks prompts and that no block is given back twice, keeps what the sampler reads of each request in arrays, and knows
priorities, tenants, forks, swapping and plans that are committed late, of which nothing happens in these mixes.

A row is a mix: microseconds of nano-vllm's for 256 tokens, and the share of it that ours takes with each prefix cache,
the median of the rounds and in brackets their least and greatest.
"""

from __future__ import annotations

import argparse
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.bench.test_scheduler_steps import BLOCK_SIZE, NUM_SEQS
from tests.tsched.schedulers import build_scheduler
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies import PREFIX_CACHES

NUM_BLOCKS = NUM_SEQS * 2048 // BLOCK_SIZE


@dataclass(frozen=True)
class Mix:
    """Requests of `prompt` tokens, up to a quarter fewer, and outputs drawn from `shortest` to `longest` tokens."""

    prompt: int
    shortest: int
    longest: int

    def __str__(self) -> str:
        return f"{self.prompt}:{self.shortest}-{self.longest}"

    @classmethod
    def parse(cls, text: str) -> Mix:
        prompt, _, outputs = text.partition(":")
        shortest, _, longest = outputs.partition("-")
        return cls(int(prompt), int(shortest), int(longest))

    def requests(self) -> Iterator[tuple[list[int], int]]:
        """Prompts and lengths of outputs, for ever; the first ones as if met at a random moment of their lives."""
        rng, number = np.random.default_rng(0), 0
        while True:
            prompt = rng.integers(0, 2**31, self.prompt - int(rng.integers(0, self.prompt // 4 + 1))).tolist()
            shortest = self.shortest if number >= NUM_SEQS else 2
            yield prompt, int(rng.integers(shortest, self.longest + 1))
            number += 1


_OUTPUTS = ((2, 16), (2, 64), (16, 128), (129, 512), (129, 1024))
MIXES = tuple(Mix(prompt, *outputs) for prompt in (128, 512, 1024) for outputs in _OUTPUTS)


class Service(ABC):
    """One scheduler under a mix. `seconds` and `num_tokens` are sums."""

    def __init__(self, mix: Mix) -> None:
        self.requests = mix.requests()
        self.seconds, self.num_tokens = 0.0, 0
        self.num_taken = 0  # tokens of all requests that have come

    def fill(self) -> None:
        """Turns until what has come would fill the pool, so that caches evict from then on."""
        while self.num_taken < 1.25 * NUM_BLOCKS * BLOCK_SIZE:
            self.turn()

    def turn(self) -> None:
        """Steps, with the arrivals between them, until 256 tokens have come."""
        until = self.num_tokens + NUM_SEQS
        while self.num_tokens < until:
            while self.num_unfinished() < NUM_SEQS:
                prompt, num_output = next(self.requests)
                self.num_taken += len(prompt) + num_output
                self.arrive(prompt, num_output)
            self.step()

    @abstractmethod
    def num_unfinished(self) -> int: ...

    @abstractmethod
    def arrive(self, prompt: list[int], num_output: int) -> None: ...

    @abstractmethod
    def step(self) -> None: ...


class OurService(Service):
    def __init__(self, mix: Mix, prefix_cache: str) -> None:
        super().__init__(mix)
        self.scheduler = build_scheduler(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=NUM_SEQS * (mix.prompt + 1),
            max_model_len=mix.prompt + mix.longest,
            prefix_cache=prefix_cache,
        )
        self.num_added = 0
        self.tokens = np.ones(NUM_SEQS, dtype=np.int64)

    def num_unfinished(self) -> int:
        return self.scheduler.num_running + self.scheduler.num_waiting

    def arrive(self, prompt: list[int], num_output: int) -> None:
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        began = time.thread_time()
        self.scheduler.add(self.num_added, prompt, params)
        self.seconds += time.thread_time() - began
        self.num_added += 1

    def step(self) -> None:
        began = time.thread_time()
        plan = self.scheduler.schedule()
        scheduled = time.thread_time()
        tokens = self.tokens[: plan.sampled.size]
        resumed = time.thread_time()
        self.scheduler.commit(plan, tokens)
        self.seconds += time.thread_time() - resumed + scheduled - began
        self.num_tokens += tokens.size


class NanoService(Service):
    def __init__(self, mix: Mix, package: str) -> None:
        super().__init__(mix)
        module = import_module(f"{package}.engine.sequence")
        self._sequence, self._params = module.Sequence, import_module(f"{package}.sampling_params").SamplingParams
        self._sequence.block_size = BLOCK_SIZE
        config = SimpleNamespace(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=NUM_SEQS * (mix.prompt + 1),
            eos=-1,
            kvcache_block_size=BLOCK_SIZE,
            num_kvcache_blocks=NUM_BLOCKS,
        )
        self._scheduler: Any = import_module(f"{package}.engine.scheduler").Scheduler(config)

    def num_unfinished(self) -> int:
        return len(self._scheduler.running) + len(self._scheduler.waiting)

    def arrive(self, prompt: list[int], num_output: int) -> None:
        params = self._params(max_tokens=num_output, ignore_eos=True)
        began = time.thread_time()
        self._scheduler.add(self._sequence(prompt, params))
        self.seconds += time.thread_time() - began

    def step(self) -> None:
        began = time.thread_time()
        sequences, is_prefill = self._scheduler.schedule()
        scheduled = time.thread_time()
        tokens = [1] * len(sequences)
        resumed = time.thread_time()
        self._scheduler.postprocess(sequences, tokens, is_prefill)
        self.seconds += time.thread_time() - resumed + scheduled - began
        self.num_tokens += len(tokens)


def load(checkout: Path) -> str:
    """Make `checkout`'s package importable without running its __init__, which wants a GPU; returns its name."""
    package = ModuleType("nanovllm")
    package.__path__ = [str(checkout / "nanovllm")]
    sys.modules["nanovllm"] = package
    configuration = ModuleType("nanovllm.config")  # only named in annotations; the real one wants a model's directory
    configuration.Config = object  # type: ignore[attr-defined]
    sys.modules["nanovllm.config"] = configuration
    return "nanovllm"


def compare(mix: Mix, package: str, num_rounds: int, num_turns: int) -> tuple[float, dict[str, list[float]]]:
    """Microseconds of nano-vllm's for 256 tokens, the median; ours over it, by prefix cache, in each round."""
    services: dict[str, Service] = {"nano-vllm": NanoService(mix, package)}
    services |= {name: OurService(mix, name) for name in PREFIX_CACHES}
    found: dict[str, list[float]] = {name: [] for name in services}
    for service in services.values():
        service.fill()
    for _ in range(num_rounds):
        for service in services.values():
            service.seconds, service.num_tokens = 0.0, 0
        for _ in range(num_turns):
            for service in services.values():
                service.turn()
        for name, service in services.items():
            found[name].append(1e6 * NUM_SEQS * service.seconds / service.num_tokens)
    theirs = found.pop("nano-vllm")
    return float(np.median(theirs)), {
        name: [one / other for one, other in zip(ours, theirs, strict=True)] for name, ours in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--turns", type=int, default=60, help="of each scheduler in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mix", type=Mix.parse, action="append", help="PROMPT:SHORTEST-LONGEST, repeatable")
    given = parser.parse_args()
    package = load(given.checkout)
    print(f"{'prompt:output':>14} {'nano us':>9}  " + "".join(f"{name:>18}" for name in PREFIX_CACHES))
    for mix in given.mix or MIXES:
        theirs, ratios = compare(mix, package, given.rounds, given.turns)
        cells = (f"{np.median(one):.2f} ({min(one):.2f}-{max(one):.2f})" for one in ratios.values())
        print(f"{mix!s:>14} {theirs:>9.0f}  " + "".join(f"{cell:>18}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
