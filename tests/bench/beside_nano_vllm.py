"""Our scheduler and nano-vllm's in one run, step by step in turn, through the same mix of arrivals and finishes.

python -m tests.bench.beside_nano_vllm PATH/TO/nano-vllm [--context 1024] [--steps 2500]

The path is a checkout of github.com/GeeeekExplorer/nano-vllm, of which only the scheduler is loaded; it needs xxhash.
That scheduler runs prompts in steps of their own, so its steps are compared by the token that each running sequence
gets: all its time, over its decode steps. It always keeps prefixes, as `hash` does here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.bench.test_scheduler_steps import BLOCK_SIZE, LONGEST_OUTPUT, NUM_SEQS, Service
from tsched.scheduling.policies import PREFIX_CACHES


class NanoService:
    """256 sequences of nano-vllm's scheduler run; as one finishes another comes."""

    def __init__(self, package: str, context: int) -> None:
        module = import_module(f"{package}.engine.sequence")
        self._sequence, self._params = module.Sequence, import_module(f"{package}.sampling_params").SamplingParams
        self._sequence.block_size = BLOCK_SIZE
        self._rng = np.random.default_rng(0)
        self._context = context
        config = SimpleNamespace(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=NUM_SEQS * (context + 1),
            eos=-1,
            kvcache_block_size=BLOCK_SIZE,
            num_kvcache_blocks=(NUM_SEQS + 8) * -(-(context + LONGEST_OUTPUT) // BLOCK_SIZE),
        )
        self._scheduler: Any = import_module(f"{package}.engine.scheduler").Scheduler(config)
        self.seconds = 0.0
        self.num_decode_steps = 0
        self.step()

    def step(self) -> None:
        """Timed: schedule and postprocess. Untimed: arrivals."""
        scheduler = self._scheduler
        while len(scheduler.running) + len(scheduler.waiting) < NUM_SEQS:
            prompt = self._rng.integers(0, 2**31, self._context - int(self._rng.integers(0, 256))).tolist()
            params = self._params(max_tokens=int(self._rng.integers(2, LONGEST_OUTPUT)), ignore_eos=True)
            scheduler.add(self._sequence(prompt, params))
        began = time.thread_time()
        sequences, is_prefill = scheduler.schedule()
        scheduled = time.thread_time()
        tokens = [1] * len(sequences)
        resumed = time.thread_time()
        scheduler.postprocess(sequences, tokens, is_prefill)
        self.seconds += time.thread_time() - resumed + scheduled - began
        self.num_decode_steps += not is_prefill


def load(checkout: Path) -> str:
    """Make `checkout`'s package importable without running its __init__, which wants a GPU; returns its name."""
    package = ModuleType("nanovllm")
    package.__path__ = [str(checkout / "nanovllm")]
    sys.modules["nanovllm"] = package
    configuration = ModuleType("nanovllm.config")  # only named in annotations; the real one wants a model's directory
    configuration.Config = object  # type: ignore[attr-defined]
    sys.modules["nanovllm.config"] = configuration
    return "nanovllm"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2500)
    given = parser.parse_args()
    ours = {name: Service(given.context, name, lag=0) for name in PREFIX_CACHES}
    seconds: dict[str, list[float]] = {name: [] for name in ours}
    nano = NanoService(load(given.checkout), given.context)
    for index in range(100 + given.steps):
        if index == 100:
            nano.seconds, nano.num_decode_steps = 0.0, 0
            for mine in seconds.values():
                mine.clear()
        nano.step()
        for name, service in ours.items():
            service.arrive()
            began = time.thread_time()
            service.step()
            seconds[name].append(time.thread_time() - began)
    theirs = 1e6 * nano.seconds / nano.num_decode_steps
    row: dict[str, Any] = {"context": given.context, "nano_vllm_us": round(theirs, 1)}
    for name, mine in seconds.items():
        micros = 1e6 * np.array(mine)
        row[name] = {
            "mean_us": round(float(micros.mean()), 1),
            "p99_us": round(float(np.percentile(micros, 99)), 1),
            "of_nano_vllm": round(float(micros.mean()) / theirs, 3),
        }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
