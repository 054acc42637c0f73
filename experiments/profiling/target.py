"""The process that a profiler watches: python -m experiments.profiling.target steps FILE [--set key=value ...], or
launch OP.VARIANT FILE [...].
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import tkernels  # noqa: F401  before anything that imports Triton
from experiments.document import ExperimentError, read_document
from experiments.planning.plan import make_sweep
from experiments.profiling.launches import run_under_ncu
from experiments.profiling.under_nsys import run_under_nsys


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="experiments.profiling.target")
    modes = parser.add_subparsers(dest="mode", required=True)
    steps, launch = modes.add_parser("steps"), modes.add_parser("launch")
    launch.add_argument("name")
    for mode in (steps, launch):
        mode.add_argument("file", type=Path)
        mode.add_argument("--set", dest="overrides", action="append", default=[])
    asked = parser.parse_args(arguments)
    try:
        plan = make_sweep(read_document(asked.file, asked.overrides)).plans[0]
        if plan.device.type != "cuda":
            raise ExperimentError([f"NVIDIA's profilers watch a GPU, and the experiment's device is {plan.device}"])
        if asked.mode == "steps":
            run_under_nsys(plan)
        else:
            run_under_ncu(plan, asked.name)
    except ExperimentError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
