"""The process that a profiler watches: python -m experiments.profiling.target steps FILE [--set key=value ...], or
launch OP.VARIANT FILE [...].
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import tkernels  # noqa: F401  before anything that imports Triton
from experiments.document import ExperimentError, read_document
from experiments.planning.plan import Plan, make_sweep
from experiments.profiling.launches import find_launch
from experiments.profiling.tools import STEADY
from experiments.stages.steady import open_steady
from tkernels.ranges import NVTX


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
            _run_steps(plan)
        else:
            _run_launch(plan, asked.name)
    except ExperimentError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _run_steps(plan: Plan) -> None:
    """For Nsight Systems: warm, then from cudaProfilerStart to Stop the graphs recorded again, so that it knows what is
    in them, and the round in the range STEADY.
    """
    steady = open_steady(plan, NVTX)
    steady.serve()
    steady.llm.forget_graphs()
    torch.cuda.synchronize(plan.device)
    torch.cuda.profiler.start()
    steady.serve()
    torch.cuda.synchronize(plan.device)
    with NVTX.named(STEADY, "phase"):
        steady.serve()
        torch.cuda.synchronize(plan.device)
    torch.cuda.profiler.stop()


def _run_launch(plan: Plan, name: str) -> None:
    """For Nsight Compute: a call that compiles and tunes, then one between cudaProfilerStart and Stop."""
    launch = find_launch(plan, name)
    launch.kernel(**launch.inputs)
    torch.cuda.synchronize(plan.device)
    torch.cuda.profiler.start()
    launch.kernel(**launch.inputs)
    torch.cuda.synchronize(plan.device)
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
