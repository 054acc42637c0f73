"""A row's status decides which figures it may carry."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from experiments.runs.rows import Row

COMMON: dict[str, Any] = {
    "run_id": "a", "arm": {"swiglu": "fused"}, "op": "swiglu", "variant": "fused", "dtype": "float32", "device": "cpu",
    "point": "decode",
}  # fmt: skip
TIMED: dict[str, Any] = {
    "bytes_moved": 8, "flops": 1, "config": None, "median_us": 2.0, "iqr_us": 0.1, "min_us": 1.9, "max_us": 2.2,
    "samples_us": [1.9, 2.0, 2.2], "timer": "perf_counter", "speed_reason": None, "roofline_fraction": None,
    "roofline_bound": None, "roofline_reason": "no roofline is known for a CPU",
}  # fmt: skip
UNTIMED: dict[str, Any] = {**TIMED, **dict.fromkeys(("median_us", "iqr_us", "min_us", "max_us", "samples_us", "timer"))}


def test_a_row_is_read_back_as_it_was_written() -> None:
    rows = [
        Row(stage="kernels", **COMMON, status="ok", **TIMED),
        Row(stage="kernels", **COMMON, status="ok", **{**UNTIMED, "speed_reason": "interpreted"}),
        Row(stage="kernels", **COMMON, status="failed", reason="out of memory"),
        Row(stage="check",
            **COMMON, status="wrong", reason="max error", seed=0, max_error_ratio=float("inf"), rms_error_ratio=None,
            replay="tk check",
        ),
    ]  # fmt: skip
    for row in rows:
        assert Row.model_validate_json(row.as_json()) == row


def test_what_is_no_finite_number_is_null_and_told_in_words() -> None:
    figures = {"seed": 0, "max_error_ratio": math.inf, "rms_error_ratio": 0.5, "replay": "tk check"}
    check = Row(stage="check", **COMMON, status="wrong", reason="max error", **figures)
    line = json.loads(check.as_json(), parse_constant=pytest.fail)
    assert (line["max_error_ratio"], line["not_finite"]) == (None, "max_error_ratio is infinite")
    assert Row.model_validate_json(check.as_json()) == Row.model_validate(line) == check
    common = {key: COMMON[key] for key in ("run_id", "arm", "dtype", "device")}
    parity = Row(stage="parity",
        **common, status="wrong", reason="not finite", workload="", first_arm={}, tokens_equal=False, requests_equal=0,
        requests=1, first_divergence={"request": 0, "place": 2, "margin": -math.inf}, logprob_drift=math.nan,
    )  # fmt: skip
    line = json.loads(parity.as_json(), parse_constant=pytest.fail)
    assert line["first_divergence"] == {"request": 0, "place": 2, "margin": None}
    assert line["not_finite"] == "first_divergence.margin is minus infinity; logprob_drift is not a number"
    again = Row.model_validate_json(parity.as_json())
    assert again.stage == "parity"
    assert again.logprob_drift is not None
    assert math.isnan(again.logprob_drift)
    assert again.first_divergence == parity.first_divergence
    for wrong in ("speed is infinite", "median_us", "samples_us.1 is infinite", "median_us is infinite"):
        row = json.loads(Row(stage="kernels", **COMMON, status="ok", **TIMED).as_json())
        with pytest.raises(ValidationError, match="not_finite tells of no figure|Extra inputs"):
            Row.model_validate({**row, "not_finite": wrong})


def test_no_sample_is_infinite() -> None:
    with pytest.raises(ValidationError, match="finite number"):
        Row(stage="kernels", **COMMON, status="ok", **{**TIMED, "samples_us": [1.9, math.inf]})


def test_a_figure_that_the_status_does_not_allow_is_absent_and_not_null() -> None:
    row = json.loads(Row(stage="kernels", **COMMON, status="failed", reason="out of memory").as_json())
    assert "median_us" not in row
    assert row["axes"] is None


@pytest.mark.parametrize(
    ("status", "reason", "figures", "message"),
    [
        ("wrong", "max error", TIMED, r"a kernels row that is wrong has \[\], got"),
        ("failed", "crash", TIMED, r"a kernels row that is failed has \['point'\]"),
        ("failed", None, {}, "a row that is failed needs its reason"),
        ("ok", "fine", TIMED, "a row that is ok has no reason"),
        ("ok", None, {}, "a kernels row that is ok has"),
        ("ok", None, UNTIMED, "median_us is either given or null with its speed_reason"),
        ("ok", None, {**TIMED, "roofline_reason": None}, "roofline_fraction is either given or null"),
        ("ok", None, {**TIMED, "speed": 3}, "Extra inputs"),
        ("good", None, TIMED, "Input should be"),
    ],
)
def test_no_figure_without_the_status_for_it(
    status: str, reason: str | None, figures: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        Row(stage="kernels", **COMMON, status=status, reason=reason, **figures)  # type: ignore[arg-type]


def test_an_arm_that_is_wrong_has_no_speed() -> None:
    common = {key: value for key, value in COMMON.items() if key != "point"}
    Row(stage="engine", **common, status="wrong", reason="its kernel is wrong", workload="")
    with pytest.raises(ValidationError, match="tokens_per_s"):
        Row(stage="engine", **common, status="wrong", reason="its kernel is wrong", workload="", tokens_per_s=100.0)


def test_a_range_of_a_step_has_its_times_or_why_it_has_none() -> None:
    common = {key: COMMON[key] for key in ("run_id", "arm", "dtype", "device")}
    times = {"calls": 8, "total_us": 5.0, "self_us": 4.0, "steps": 2, "step_us": 50.0, "share": 0.1}
    names = {"workload": "w", "range": "swiglu.fused", "category": "op", "clock": "host"}
    row = Row(stage="step", **common, status="ok", op="swiglu", variant="fused", **names, **times, speed_reason=None)
    assert Row.model_validate_json(row.as_json()) == row
    with pytest.raises(ValidationError, match="total_us is either given or null with its speed_reason"):
        Row(stage="step", **common, status="ok", **names, **times, speed_reason="interpreted")
