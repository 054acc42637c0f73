"""Rows and a device, as a GPU report has them: for tests of what is made of them."""

from typing import Any

from experiments.gpu_report.steps import Step, new_step
from experiments.runs.rows import COLUMNS, Row

GRAPH = "cuda graph, cold L2"


def describe(name: str) -> dict[str, Any]:
    """The environment of a report on the device of that name."""
    device = {"name": name, "type": "cuda", "arch": "sm_90", "multiprocessors": 132, "cuda": "12.8", "clocks": {}}
    return {"device": device, "versions": {"torch": "2.11", "gemlite": None}, "host": {}, "git": {}}


def timed(step: Step, us: float, moved: float = 2.0e9, **more: Any) -> list[Row]:
    """The rows of a step that timed a variant."""
    axes = {"activation": "bfloat16"}
    judged = {"seed": 0, "max_error_ratio": None, "rms_error_ratio": None}
    figures: dict[str, Any] = {
        **dict.fromkeys(COLUMNS["kernels"]["ok"]), "point": step.point, "bytes_moved": int(moved), "flops": 1000,
        "median_us": us, "iqr_us": 0.1, "min_us": us, "max_us": us, "samples_us": [us, us], "timer": GRAPH,
        "roofline_fraction": 0.8, "roofline_bound": "memory",
    }  # fmt: skip
    return [
        step.row("r1", "check", point=step.point, axes=axes, **judged),
        step.row("r1", "kernels", axes=axes, **{**figures, **more}),
    ]


def time_step(op: str, variant: str, point: str) -> Step:
    return new_step("time", 1.0, op, variant, "0", point)
