"""Measures how often `tk compare` raises a false alarm, and how often it finds a variant that is really slower.

    python -m tests.experiments.runs.false_alarms --repetitions 40

Every repetition runs one small experiment three times, as `tk run` does: twice the same, then with one variant that
takes 15% longer for every call (it waits). It is quiet only where every figure of the first two is within noise; the
slower variant is found where its figure is worse. The same is asked of the arms within a run. No test: it takes
minutes a repetition, and a machine may be as unsteady as it likes. Exit status 1 where either is below 95%.

    python -m tests.experiments.runs.false_alarms --repetitions 10 --under-load

Every repetition runs the experiment once, while other processes burn every core. Its arms are all of one speed. Exit
status 1 where any is named.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from experiments.runs.comparison import MIN_REPLICATES
from experiments.runs.reading import RecordedRun, read_run
from experiments.runs.verdicts import Comparison, Verdict, compare_arms, compare_runs

ROOT = Path(__file__).parents[3]
SLOWER = 0.15
SHAPES = {
    "swiglu": {"T": 64, "I": 1024},
    "paged_prefill": {
        "B": 1, "T": 96, "S": 16, "N": 6, "P": 6, "Hq": 4, "Hkv": 2, "D": 64, "Dv": 64, "lengths": "full",
    },
}  # fmt: skip
SLOW_OP = "swiglu"
VARIANT = """
import time
from functools import wraps

from tkernels import Variant
from tkernels.ops.{op}.contract import baseline


@wraps(baseline)
def mine(*arguments, **options):
    start = time.perf_counter()
    result = baseline(*arguments, **options)
    end = time.perf_counter()
    while time.perf_counter() < end + {slower} * (end - start):
        pass
    return result


VARIANT = Variant(wins="never", function=mine, deterministic=True, batch_invariant=False)
"""


def write_experiment(folder: Path, replicates: int) -> Path:
    """Two ops, each with two variants of the same speed, as long as nobody slows one down."""
    for op in SHAPES:
        write_variant(folder, op, "same", 0.0)
        write_variant(folder, op, "mine", 0.0)
    file = folder / "experiment.yaml"
    kernels = {op: ["same", "mine"] for op in SHAPES}
    shapes = {op: [axes] for op, axes in SHAPES.items()}
    experiment = {
        "name": "false-alarms", "dtype": "float32", "device": "cpu", "variants_from": ["variants"], "kernels": kernels,
        "shapes": shapes, "replicates": replicates,
    }  # fmt: skip
    file.write_text(yaml.safe_dump(experiment, sort_keys=False))
    return file


def write_variant(folder: Path, op: str, name: str, slower: float) -> None:
    file = folder / "variants" / op / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(VARIANT.format(op=op, slower=slower))


def recorded(file: Path, out: Path) -> RecordedRun:
    """What `tk run` made of the experiment."""
    command = (sys.executable, "-m", "experiments.cli", "run", str(file), "--out", str(out))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"tk run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return read_run(out)


def is_quiet(found: Comparison) -> bool:
    return found.count("within noise") == len(found.verdicts)


def finds_it(found: Comparison) -> bool:
    """Whether the slower variant is worse."""
    return [one.effect.outcome for one in found.verdicts if is_slower(one)] == ["worse"]


def is_slower(verdict: Verdict) -> bool:
    """Whether it is of the variant that is made to take longer."""
    return verdict.place.startswith(SLOW_OP) and verdict.arm == "mine"


def repetition(folder: Path, file: Path) -> dict[str, bool]:
    """What is asked -> whether it was so."""
    first, second = recorded(file, folder / "first"), recorded(file, folder / "second")
    write_variant(file.parent, SLOW_OP, "mine", SLOWER)
    try:
        slower = recorded(file, folder / "slower")
    finally:
        write_variant(file.parent, SLOW_OP, "mine", 0.0)
    between, across = compare_runs(first, second), compare_runs(second, slower)
    for found in (between, across):
        for one in found.verdicts:
            change, seen = one.effect.ratio - 1, one.effect.smallest
            figure = f"{one.place.partition(',')[0]}, {one.arm}"
            print(f"  {figure:<22}{change:+7.1%}  could see {seen:5.1%}  {one.effect.outcome}")
    return {
        "two runs of the same: every figure within noise": is_quiet(between),
        f"a variant {SLOWER:.0%} slower in the second run: found": finds_it(across),
        "arms of the same speed in one run: every figure within noise": is_quiet(compare_arms(first)),
        f"an arm {SLOWER:.0%} slower than another: found": finds_it(compare_arms(slower)),
        "what did not change beside it in the second run: within noise": all(
            one.effect.outcome == "within noise" for one in across.verdicts if not is_slower(one)
        ),
    }


@contextmanager
def burnt_cores() -> Iterator[None]:
    """A process for each core that does nothing but work, as long as this one lives."""
    code = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
    burning = [subprocess.Popen((sys.executable, "-c", code)) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def repetition_under_load(folder: Path, file: Path) -> dict[str, bool]:
    """What is asked -> whether it was so."""
    with burnt_cores():
        run = recorded(file, folder / "loaded")
    return {"arms of the same speed under load: none named": is_quiet(compare_arms(run))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--replicates", type=int, default=10, help="processes for each arm of a run, 5 at least")
    parser.add_argument("--out", type=Path, help="keeps the runs here")
    parser.add_argument("--under-load", action="store_true", help="one run a repetition, while every core is burnt")
    asked = parser.parse_args()
    repeat, least = (repetition_under_load, 1.0) if asked.under_load else (repetition, 0.95)
    if asked.replicates < MIN_REPLICATES or asked.repetitions < 1:
        parser.error(f"--replicates is {MIN_REPLICATES} at least, --repetitions 1")
    counts: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (asked.out or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        file = write_experiment(folder, asked.replicates)
        for number in range(1, asked.repetitions + 1):
            here = folder / f"{number:03}"
            here.mkdir()
            counts.update({what: int(was_so) for what, was_so in repeat(here, file).items()})
            print(f"after {number} of {asked.repetitions}, {(time.monotonic() - start) / 60:.1f} minutes:", flush=True)
            for what, count in counts.items():
                print(f"  {count} of {number}: {what}", flush=True)
    return int(any(count < least * asked.repetitions for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
