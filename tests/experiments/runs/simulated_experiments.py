"""Simulates experiments on the drift that a machine was recorded with, and counts what the judge says of them.

    python -m tests.experiments.runs.simulated_experiments --count 10000

The record is of real processes that followed each other: `--record 600 --file FILE` takes the times of a few ops and of
the yardstick in each, as a run does. A simulated experiment takes, for each of four figures, the drift of a stretch of
it from a random place on, and off that what any process was off the drift around it: of arms, processes that took
turns; of runs, those of one after those of the other, of which an arm that was changed is judged beside one that was
not, where there is one. It is a false alarm where any of its figures is named. With one
figure raised by 15%, the change is found where that figure is named, and named slower. Exit status 1 where more than 1%
are false alarms, or fewer than 97% of the changes of an arm are found.
"""

import argparse
import csv
import functools
import math
import os
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.runs.comparison import Effect
from experiments.runs.drift import slope_spread
from experiments.runs.table import Figure
from experiments.runs.verdicts import judge_pairs
from tests.experiments.runs.false_alarms import SHAPES, SLOWER

RECORD = Path(__file__).parent / "data" / "drift.csv"
"""Of two cores with next to nothing else on them. Beside it lies `drift_busy.csv`, of the same at a load of 2 to 10."""
_SHAPES: dict[str, dict[str, Any]] = {
    **SHAPES,
    "rms_norm": {"T": 256, "H": 512},
    "matmul": {"M": 32, "N": 256, "K": 256},
}
_WINDOW = 9  # processes: what lasts for most of these is drift
OPS, MOST_ALARMS, LEAST_FOUND = 4, 0.01, 0.97
THREADS = 1, 2
Process = tuple[float, float]
"""Logarithms of a process's time and of its yardstick's."""


def record(file: Path, processes: int) -> None:
    """Forks processes one after the other, by turns with each of THREADS, and writes for each and each op: threads, op,
    time, yardstick, both in us.
    """
    import torch

    from experiments.stages.yardstick import Yardstick
    from tkernels import OPS
    from tkernels.measurement import complete_axes
    from tkernels.timing import time_call

    with file.open("w", newline="") as opened:
        csv.writer(opened, lineterminator="\n").writerow(("threads", "op", "median_us", "yardstick_us"))
        for number in range(processes * len(THREADS)):
            opened.flush()
            if (child := os.fork()) == 0:
                threads = THREADS[number % len(THREADS)]
                torch.set_num_threads(threads)
                for op, axes in _SHAPES.items():
                    contract = OPS[op].contract
                    at = complete_axes(contract, {**axes, "activation": "float32"})
                    case = contract.case(at, 0, torch.device("cpu"))
                    yardstick = Yardstick()
                    call = functools.partial(OPS[op].variants["torch"], **case.inputs)
                    median = time_call(call, "cpu", samples=200, between=yardstick).median_us
                    opened.write(f"{threads},{op},{median:.6g},{yardstick.median_us:.6g}\n")
                opened.flush()
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                sys.exit("a process of the record failed")


@dataclass(frozen=True)
class Recorded:
    """An op's processes in the order in which they ran. slow: how the machine drifted, the medians of _WINDOW processes
    around each. fast: what each process was off that, figure and yardstick together.
    """

    slow: Sequence[Process]
    fast: Sequence[Process]

    def stretch(self, draw: random.Random, length: int) -> list[Process]:
        """So many processes that follow each other: the drift as it was from a random one on, with the rest of any."""
        start = draw.randrange(len(self.slow) - length + 1)
        off = draw.choices(self.fast, k=length)
        return [(t + dt, y + dy) for (t, y), (dt, dy) in zip(self.slow[start : start + length], off, strict=True)]


def read_record(file: Path) -> dict[int, list[Recorded]]:
    """Number of threads -> each op's."""
    ops: dict[tuple[str, str], list[Process]] = {}
    with file.open(newline="") as opened:
        for line in csv.DictReader(opened):
            times = math.log(float(line["median_us"])), math.log(float(line["yardstick_us"]))
            ops.setdefault((line["threads"], line["op"]), []).append(times)
    found: dict[int, list[Recorded]] = {}
    for (threads, _), processes in ops.items():
        windows = [processes[max(0, at - _WINDOW // 2) : at + _WINDOW // 2 + 1] for at in range(len(processes))]
        slow = [(statistics.median(t for t, _ in one), statistics.median(y for _, y in one)) for one in windows]
        fast = [(t - ts, y - ys) for (t, y), (ts, ys) in zip(processes, slow, strict=True)]
        found.setdefault(int(threads), []).append(Recorded(slow, fast))
    return found


def take_turns(processes: Sequence[Process]) -> list[Sequence[Process]]:
    """A process of each of two arms in each replicate; every second time the other way round, as a run does it."""
    pairs = zip(processes[::2], processes[1::2], strict=True)
    return [pair[:: -1 if index % 2 else 1] for index, pair in enumerate(pairs)]


def figure(processes: Sequence[Process], slower: float) -> Figure:
    one = Figure("median_us", "us", "lower", "", "", "")
    one.values = {index: time + math.log1p(slower) for index, (time, _) in enumerate(processes)}
    one.yardsticks = {index: yardstick for index, (_, yardstick) in enumerate(processes)}
    return one


def simulate_arms(
    draw: random.Random, record: Sequence[Recorded], processes: int, slower: float, threads: int
) -> list[Effect]:
    """Two arms of one run, at each of OPS ops, of which the first op's second arm is slower."""
    pairs = {}
    for op in range(OPS):
        first, second = zip(*take_turns(draw.choice(record).stretch(draw, 2 * processes)), strict=True)
        pairs[op] = figure(first, 0.0), figure(second, slower if op == 0 else 0.0)
    found = judge_pairs(pairs)[0]
    return [found[op].effect for op in range(OPS)]


def simulate_runs(
    draw: random.Random, record: Sequence[Recorded], processes: int, slower: float, threads: int
) -> list[Effect]:
    """Two runs, the second after the first, each with an arm at each of OPS ops, of which the first is slower then."""
    pairs = {}
    for op in range(OPS):
        mine = draw.choice(record).stretch(draw, 4 * processes)[::2]  # the processes between were the other arm's
        pairs[op] = figure(mine[:processes], 0.0), figure(mine[processes:], slower if op == 0 else 0.0)
    found = judge_pairs(pairs, of_runs=True, spread=slope_spread(threads))[0]
    return [found[op].effect for op in range(OPS)]


KINDS = {
    "arms of one run": simulate_arms,
    "two runs": simulate_runs,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="experiments of each kind")
    parser.add_argument("--processes", type=int, default=10, help="of each arm, 5 at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=RECORD, help="the record")
    parser.add_argument(
        "--record", type=int, metavar="PROCESSES", help="of each number of threads: makes the record first"
    )
    asked = parser.parse_args()
    if asked.record:
        record(asked.file, asked.record)
    missed = False
    for threads, recorded in read_record(asked.file).items():
        print(f"{threads} threads: {len(recorded[0].slow)} recorded processes, {len(recorded)} ops, seed {asked.seed}")
        for what, simulate in KINDS.items():
            draw = random.Random(asked.seed)
            alarms = found = 0
            for _ in range(asked.count):
                equal = simulate(draw, recorded, asked.processes, 0.0, threads)
                alarms += any(one.outcome != "within noise" for one in equal)
                found += simulate(draw, recorded, asked.processes, SLOWER, threads)[0].outcome == "worse"
            missed |= alarms > MOST_ALARMS * asked.count
            missed |= simulate is simulate_arms and found < LEAST_FOUND * asked.count
            print(f"{what}: {asked.count} experiments of {OPS} figures, {asked.processes} processes each", flush=True)
            print(f"  false alarms: {alarms} ({alarms / asked.count:.2%})", flush=True)
            print(f"  changes by {SLOWER:.0%} found: {found} ({found / asked.count:.2%})", flush=True)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
