"""What the named ranges of a step cost when nobody listens, against a step of the tiny model.

python -m tests.bench.range_cost [--rounds 40] [--batch 1 32] [--extra 20]

A `with` statement cannot be taken out of a running engine, so its cost is found by adding more: two engines in one
process, one as it is and one whose every range is entered and left `extra` times more, serve the same decode steps in
turns. What the additional ranges take, over their number, is what the ranges take that are there. The shares are of the
first engine's step, the median over the pairs of rounds; a third engine records what runs, for comparison.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from tkernels.ranges import NVTX, SILENCE, CapturedRanges, Category, Ranges
from tkernels.recording import Recording
from tmodel.presets import preset_path
from tsched import LLM, SamplingParams

_BUDGET = 0.01


class ManyRanges:
    """Ranges that nobody listens to, each entered and left `extra` times more than asked."""

    listening = False

    def __init__(self, extra: int) -> None:
        self.extra = extra
        self.entered = 0

    def named(self, name: str, category: Category, *, launches: bool = True) -> Any:
        return _ManyTimes(self)

    def captured(self) -> CapturedRanges:
        return SILENCE


class _ManyTimes:
    def __init__(self, ranges: ManyRanges) -> None:
        self.ranges = ranges
        self.times = range(ranges.extra)

    def __enter__(self) -> None:
        self.ranges.entered += 1
        for _ in self.times:
            with SILENCE:
                pass

    def __exit__(self, kind: Any, error: Any, trace: Any, /) -> None:
        pass


def engine(ranges: Ranges, batch: int) -> LLM:
    return LLM(preset_path("tiny"), device="cpu", max_num_seqs=batch, kv_cache_bytes=1 << 24, ranges=ranges)


def round_of(llm: LLM, batch: int, steps: int) -> float:
    """Seconds of the processor a step: what other programs take of it does not count."""
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    prompts = [[3 + number, 5, 7] for number in range(batch)]
    before = llm.stats().num_steps
    began = time.thread_time()
    llm.generate(prompts, params, use_tqdm=False)
    return (time.thread_time() - began) / (llm.stats().num_steps - before)


def measure(batch: int, rounds: int, extra: int, steps: int) -> str:
    many, recording = ManyRanges(extra), Recording("cpu")
    plain, amplified, recorded = (engine(ranges, batch) for ranges in (NVTX, many, recording))
    for llm in (plain, amplified, recorded):
        round_of(llm, batch, steps)
    many.entered = 0
    before = amplified.stats().num_steps
    seconds, shares, recording_shares = [], [], []
    for number in range(rounds):
        order = [plain, amplified, recorded]
        took = {id(llm): round_of(llm, batch, steps) for llm in (order if number % 2 else order[::-1])}
        one = took[id(plain)]
        seconds.append(one)
        shares.append((took[id(amplified)] - one) / extra / one)
        recording_shares.append(took[id(recorded)] / one - 1)
        recording.clear()
    per_step = many.entered / (amplified.stats().num_steps - before)
    share = statistics.median(shares)
    first, _, third = statistics.quantiles(shares, n=4)
    step_us = statistics.median(seconds) * 1e6
    return (
        f"batch {batch}: {per_step:.0f} ranges in a step of {step_us:.0f} us take {share:.2%} of it "
        f"(quartiles {first:.2%} to {third:.2%}, {share * step_us * 1000 / per_step:.0f} ns each): "
        f"{'within' if share < _BUDGET else 'ABOVE'} the budget of {_BUDGET:.0%}; recording them takes "
        f"{statistics.median(recording_shares):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--extra", type=int, default=20)
    parser.add_argument("--steps", type=int, default=64)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if NVTX.listening:
        raise SystemExit("an NVTX tool listens here: this measures what ranges cost without one")
    for batch in asked.batch:
        print(measure(batch, asked.rounds, asked.extra, asked.steps))


if __name__ == "__main__":
    main()
