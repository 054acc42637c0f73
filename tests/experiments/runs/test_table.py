"""Which figures of a run are compared, and what they are called."""

import math
from typing import Any

import pytest

from experiments.runs.rows import COLUMNS, Row
from experiments.runs.table import times_of
from tests.experiments.runs.folders import kernel_row

PERCENTILES = {"p50": 0.2, "p90": 0.3, "p99": 0.4}


def engine_row(variant: str, rate: float, **more: Any) -> Row:
    figures = dict.fromkeys(COLUMNS["engine"]["ok"])
    figures |= {"workload": "chat", "tokens_per_s": rate, "ttft_s": PERCENTILES, "tpot_s": PERCENTILES}
    figures["gap_s"] = PERCENTILES
    arm = {"swiglu": variant, "rms_norm": "torch"}
    return Row(stage="engine", run_id="a", arm=arm, dtype="float32", device="cpu", status="ok", **{**figures, **more})


def peer_row(rate: float, **more: Any) -> Row:
    figures = dict.fromkeys(COLUMNS["peers"]["ok"])
    figures |= {"workload": "chat", "peer": "transformers", "tokens_per_s": rate, **more}
    return Row(
        stage="peers", run_id="a", arm={"swiglu": "torch"}, dtype="float32", device="cpu", status="ok", **figures
    )


def test_a_rate_and_a_time_beside_the_yardstick_say_the_same_of_a_slow_machine() -> None:
    rows = [
        engine_row("torch", 100.0, yardstick_us=50.0),
        engine_row(
            "torch", 50.0, replicate=1, yardstick_us=100.0, ttft_s={"p50": 0.4}, tpot_s={"p50": 0.4}, gap_s={"p99": 0.8}
        ),
    ]
    figures = times_of(rows)
    assert [figure.name for figure in figures.values()] == ["tokens_per_s", "ttft_s.p50", "tpot_s.p50", "gap_s.p99"]
    for figure in figures.values():
        assert figure.has_yardstick
        assert figure.values[1] - figure.values[0] == pytest.approx(math.log(0.5 if figure.better == "higher" else 2))
        assert figure.values[1] - figure.values[0] == pytest.approx(figure.yardsticks[1] - figure.yardsticks[0])


def test_a_yardstick_that_one_process_lacks_is_none() -> None:
    (figure, *_) = times_of(
        [engine_row("torch", 1.0, yardstick_us=5.0), engine_row("torch", 1.0, replicate=1)]
    ).values()
    assert not figure.has_yardstick
    assert figure.mean == pytest.approx(1.0)


def test_arms_are_called_by_what_differs_and_stand_beside_peers() -> None:
    rows = [
        engine_row("torch", 1.0, settings={"block_size": 16, "workload.num_requests": 4}),
        engine_row("fused", 1.0, settings={"block_size": 32, "workload.num_requests": 4}),
        engine_row("fused", 1.0, settings={"block_size": 32, "workload.num_requests": 8}),
        peer_row(2.0, settings={"workload.num_requests": 8}),
    ]
    rates = [figure for figure in times_of(rows).values() if figure.name == "tokens_per_s"]
    assert [figure.title for figure in rates] == [
        "torch, block_size=16", "fused, block_size=32", "fused, block_size=32", "peer transformers",
    ]  # fmt: skip
    few, many = "engine, chat, float32, workload.num_requests=4", "engine, chat, float32, workload.num_requests=8"
    assert [figure.place for figure in rates] == [few, few, many, many]
    assert rates[0].arm == "rms_norm=torch, swiglu=torch, block_size=16"
    (alone, *_) = times_of(rows[:1]).values()
    assert alone.title == "block_size=16"
    (nothing, *_) = times_of([engine_row("torch", 1.0)]).values()
    assert nothing.title == "the only arm"


def test_only_what_was_timed_is_a_figure() -> None:
    untimed = Row.model_validate(
        {"stage": "kernels", **kernel_row(1.0), "median_us": None, "speed_reason": "interpreted"}
    )
    failed = Row(
        stage="engine", run_id="a", arm={}, dtype="float32", device="cpu", status="failed", reason="no", workload=""
    )
    assert times_of([untimed, failed]) == {}


def test_quantized_models_are_told_apart_by_method_and_bits() -> None:
    common = {"run_id": "a", "arm": {}, "dtype": "float32", "device": "cpu", "status": "ok"}
    figures = {**dict.fromkeys(COLUMNS["quantization"]["ok"]), "tokens_per_s": 3.0}
    rows = [
        Row.model_validate(
            {"stage": "quantization", **common, **figures, "method": method, "bits": bits, "group_size": bits and 32}
        )
        for method, bits in (("dense", None), ("gptq", 4), ("gptq", 8))
    ]
    assert [figure.arm for figure in times_of(rows).values()] == [
        "dense", "gptq, 4 bits, group 32", "gptq, 8 bits, group 32",
    ]  # fmt: skip
