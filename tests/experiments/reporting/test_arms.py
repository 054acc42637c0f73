"""Rows of several processes as one."""

from typing import Any

import pytest

from experiments.reporting.arms import count_processes, merge_processes
from experiments.reporting.measured import engine_plots
from experiments.runs.rows import COLUMNS, Row
from tests.experiments.runs.folders import kernel_row

COMMON: dict[str, Any] = {"run_id": "a", "arm": {"swiglu": "torch"}, "dtype": "float32", "device": "cpu"}


def timed(median: float, replicate: int, **more: Any) -> Row:
    return Row.model_validate(kernel_row(median, replicate=replicate, **more))


def test_the_figure_is_the_median_over_processes_and_its_spread_lies_between_them() -> None:
    rows = [timed(2.0, 0), timed(4.0, 1), timed(3.0, 2), timed(9.0, 0, variant="fused")]
    first, second = merge_processes(rows)
    assert first.stage == "kernels"
    assert (first.median_us, first.iqr_us, first.samples_us) == (3.0, 1.0, [2.0, 4.0, 3.0])
    assert second == rows[-1]  # of one process: as it was, with its samples' own spread
    assert count_processes(rows) == 3


def test_of_what_failed_in_one_process_no_speed_is_left() -> None:
    failed = {key: value for key, value in kernel_row(1.0).items() if key in ("run_id", "stage", "arm", "op", "point")}
    failed |= {"variant": "torch", "dtype": "float32", "device": "cpu", "status": "failed", "reason": "crash"}
    bad = Row.model_validate({**failed, "replicate": 1})
    assert merge_processes([timed(2.0, 0), bad]) == [bad]


def test_other_shapes_dtypes_and_arms_stay_apart() -> None:
    rows = [timed(2.0, 0), timed(2.0, 0, point="b"), timed(2.0, 0, dtype="bfloat16"), timed(2.0, 0, settings={"a": 1})]
    assert merge_processes(rows) == rows


def test_checks_are_never_merged() -> None:
    check = Row(stage="check", **COMMON, status="ok", point="p", seed=0, max_error_ratio=0.1, rms_error_ratio=0.1)
    assert merge_processes([check, check.model_copy(update={"seed": 1})]) == [
        check,
        check.model_copy(update={"seed": 1}),
    ]


def served(tokens_per_s: float, replicate: int) -> Row:
    figures: dict[str, Any] = dict.fromkeys(COLUMNS["engine"]["ok"])
    figures |= {"workload": "", "tokens_per_s": tokens_per_s, "tokens_per_s_iqr": 1.0, "seconds": [9.0, 1.0, 0.5]}
    figures |= {"output_tokens": 60}
    figures |= {"ttft_s": dict.fromkeys(("p50", "p90", "p99"), tokens_per_s), "requests": 1, "speed_reason": None}
    return Row(stage="engine", **COMMON, **figures, status="ok", replicate=replicate)


def test_an_arm_that_several_processes_served() -> None:
    (row,) = merge_processes([served(10, 0), served(30, 1), served(20, 2)])
    assert row.stage == "engine"
    assert (row.tokens_per_s, row.tokens_per_s_iqr, row.seconds) == (20, 10, [6, 2, 3])
    (point,) = engine_plots([row], "", "")[0].points
    assert (point.values, point.low, point.high) == ((20,), 15, 25)  # of the processes, not of all their rounds
    assert row.ttft_s == {"p50": 20, "p90": 20, "p99": 20}
    assert row.tpot_s is None


def test_requests_that_failed_in_one_process_are_not_forgotten() -> None:
    bad = served(30, 1).model_copy(update={"requests_failed": 1, "requests_error": "too long"})
    for rows in ([served(10, 0), bad], [served(10, 0).model_copy(update={"tokens_per_s": None}), bad]):
        (row,) = merge_processes(rows)
        assert row.stage == "engine"
        assert row.unserved == "1 of 1 requests failed: too long"


def test_of_several_comparisons_the_worst_is_shown() -> None:
    def parity(equal: int, drift: float, replicate: int) -> Row:
        return Row(stage="parity",
            **COMMON, status="ok", workload="", first_arm={}, tokens_equal=equal == 4, requests_equal=equal, requests=4,
            first_divergence=None, logprob_drift=drift, replicate=replicate,
        )  # fmt: skip

    (row,) = merge_processes([parity(4, 0.1, 0), parity(3, 0.0, 1), parity(3, 0.2, 2), parity(4, 0.9, 3)])
    assert row.stage == "parity"
    assert (row.requests_equal, row.logprob_drift) == (3, pytest.approx(0.2))
