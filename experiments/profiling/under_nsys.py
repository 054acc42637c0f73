"""A steady round as Nsight Systems watches it."""

import torch

from experiments.planning.plan import Plan
from experiments.stages.steady import open_steady
from tkernels.ranges import NVTX

STEADY = "steady"
"""The range around the round that a profile is about; what comes before it warms up, and records graphs."""


def run_under_nsys(plan: Plan, index: int = 0) -> None:
    """What Nsight Systems watches: warm, then from cudaProfilerStart to Stop the graphs recorded again, so that it
    knows what is in them, and the round in the range STEADY.
    """
    steady = open_steady(plan, NVTX, index)
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
