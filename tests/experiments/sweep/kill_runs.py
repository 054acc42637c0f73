"""Runs that are killed at random moments and gone on with: do they end with the rows of one that was left alone?

`python -m tests.experiments.sweep.kill_runs --times 20` prints a line for each, and leaves with 1 where one does not.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.runs.rows import Row, describe_columns
from tests.tkernels.marked_processes import left_over, marked

_TIMES = ("us", "s", "tokens/s")
_RATIOS_OF_TIMES = frozenset({"roofline_fraction", "roofline_reason", "speedup", "speedup_iqr", "speedups", "share"})
_OF_THE_MACHINE = {"host_peak_bytes", "device_peak_bytes", "load_before", "load_after"}


def untimed_columns() -> frozenset[str]:
    """The columns that two runs of the same experiment have in common."""
    about = describe_columns()
    parts = [about["every row"], *about["stages"].values()]
    timed = {name for part in parts for name, one in part.items() if one["unit"] in _TIMES}
    return frozenset(name for part in parts for name in part) - timed - _RATIOS_OF_TIMES - _OF_THE_MACHINE - {"run_id"}


def facts_of(folder: Path) -> Counter[str]:
    """Each row of a run without its times, and how often it is there."""
    kept = untimed_columns()
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for row in rows:
        Row.model_validate(row)
    return Counter(json.dumps({key: row[key] for key in sorted(kept & set(row))}) for row in rows)


def differences(whole: Counter[str], other: Counter[str]) -> list[str]:
    """What one has and the other has not; a row that is there twice is told too."""
    return [f"lacks {row}" for row in (whole - other).elements()] + [
        f"has too much: {row}" for row in (other - whole).elements()
    ]


def killed_and_resumed(file: Path, out: Path, after: Iterable[float]) -> list[str]:
    """What is wrong with a run that is killed after each of these seconds, and then left to end."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    wrong = []
    for seconds in after:
        process = start(file, out, mark)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        wrong += [f"left over: {line}" for line in left_over(mark, seconds=10.0)]
    if (out / "run.json").exists():
        if json.loads((out / "run.json").read_text())["finished"] is None:
            wrong += _ended(start(file, out, mark, "--resume"))
    else:  # it was killed before there was a run
        wrong += _ended(start(file, out, mark))
    return wrong


def start(file: Path, out: Path, mark: str = "", option: str = "--out") -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "experiments.cli", "run", str(file), option, str(out)]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=marked(mark), cwd=file.parent
    )


def _ended(process: "subprocess.Popen[str]") -> list[str]:
    _, said = process.communicate()
    return [] if process.returncode == 0 else [f"exit status {process.returncode}: {said[-2000:]}"]


def write_experiment(folder: Path, **keys: Any) -> Path:
    """One that has tasks of every phase, on a model of random weights."""
    from tests.tsched.random_model import save_random_model

    (folder / "model").mkdir(parents=True)
    save_random_model(folder / "model")
    data: Mapping[str, Any] = {
        "name": "killed", "model": {"path": "model"}, "dtype": "float32", "device": "cpu", "repeats": 1,
        "replicates": 2, "kernels": {"swiglu": ["torch", "fused"]},
        "scheduler": {"max_num_seqs": 2, "block_size": 8, "kv_cache_bytes": 1 << 18},
        "workload": {"kind": "synthetic", "num_requests": 3, "input_len": 6, "output_len": 4},
        "peers": ["without_kv_cache"], **keys,
    }  # fmt: skip
    file = folder / "experiment.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))
    return file


def trial(file: Path, folder: Path, times: int, seed: int = 0, kills: int = 1) -> list[str]:
    """An undisturbed run, and so many that are killed; returns what is wrong, a line for each run."""
    began = time.monotonic()
    wrong = _ended(start(file, folder / "whole"))
    took = time.monotonic() - began
    if wrong:
        return wrong
    whole = facts_of(folder / "whole")
    generator = random.Random(seed)
    found = []
    for number in range(times):
        # Of several, each is of a new start: long enough for some of it to get on.
        moments = [generator.uniform(0.0, took if kills == 1 else took / 3) for _ in range(kills)]
        out = folder / f"killed-{number}"
        problems = killed_and_resumed(file, out, moments)
        problems += differences(whole, facts_of(out))
        found += [f"run {number}, killed after {moments}: {problem}" for problem in problems]
        at = ", ".join(f"{moment:.2f} s" for moment in moments)
        print(
            f"killed after {at} of {took:.1f} s: {'; '.join(problems) or f'the same {whole.total()} rows'}", flush=True
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.experiments.sweep.kill_runs", description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--kills", type=int, default=1, help="of each run, one start after the other")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = write_experiment(Path(folder))
        return 1 if trial(file, Path(folder), arguments.times, arguments.seed, arguments.kills) else 0


if __name__ == "__main__":
    sys.exit(main())
