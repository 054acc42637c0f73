"""What a report plans: nothing is done twice, the marks come first, changed code is measured anew."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_report.marks import MARKS, PUBLISHED
from experiments.gpu_report.steps import (
    Step,
    finished_keys,
    has_counters,
    make_steps,
    new_step,
    report_points,
    schedule,
    steps_left,
    tuning_point,
)
from experiments.peers import with_peers
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.device import TARGETS
from tkernels.tuning import bucket

H200 = TARGETS["sm_90"]


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return make_steps(with_peers(OPS), H200, 16)


def test_what_came_to_its_end_is_done_whatever_it_found() -> None:
    device, check, mark = new_step("device", 1.0), new_step("check", 1.0, "swiglu", "fused"), new_step("mark", 1.0)
    found: dict[str, Any] = {"test": "drawn cases", "point": "I=8", "runs": 2, "runs_right": 1}
    rows = [
        device.row("r1", "report"),
        check.row("r1", "hardware", "wrong", "one is wrong", **found),
        mark.row("r1", "hardware", **{**found, "runs_right": 2}),
        mark.row("r1", "report", "failed", "killed by SIGSEGV"),
    ]
    assert finished_keys(rows) == {device.key, check.key}
    assert steps_left([device, check, mark], rows) == [mark]


def test_every_kind_of_step_is_planned_and_names_are_unique(steps: list[Step]) -> None:
    assert len({step.key for step in steps}) == len(steps)
    kinds = list(dict.fromkeys(step.kind for step in steps))
    assert kinds == ["device", "precompile", "check", "tune", "time", "mark", "engine", "rerun", "stress", "sanitizer"]
    triton = {(o.name, v.name) for o in OPS.values() for v in o.variants.values() if v.kind == "triton"}
    for kind in ("check", "tune", "sanitizer"):
        assert {(s.op, s.variant) for s in steps if s.kind == kind} == triton
    timed = {(s.op, s.point, s.variant) for s in steps if s.kind == "time"}
    for op in with_peers(OPS).values():
        assert timed >= {(op.name, point, name) for point in report_points(op.contract) for name in op.variants}


def test_marks_are_timed_before_everything_else(steps: list[Step]) -> None:
    marked = {(mark.op, mark.point) for mark in MARKS}
    places = [(step.op, step.point) for step in steps if step.kind == "time"]
    last_marked = max(index for index, place in enumerate(places) if place in marked)
    assert all(place in marked for place in places[: last_marked + 1])
    for mark in MARKS:  # each of them exists, and so do the peers it names
        assert mark.point in report_points(OPS[mark.op].contract)
        assert set(mark.peers) & set(with_peers(OPS)[mark.op].variants)
    for published in PUBLISHED:
        assert published.point in report_points(OPS[published.op].contract)
        assert published.peer in with_peers(OPS)[published.op].variants


def test_the_last_arriver_is_stressed(steps: list[Step]) -> None:
    assert ("paged_decode", "last_arriver") in {(s.op, s.variant) for s in steps if s.kind == "stress"}
    assert not has_counters(OPS["rms_norm"].variants["row_per_program"], H200)


def test_a_bucket_is_tuned_at_its_largest_batch() -> None:
    variant = OPS["rms_norm"].variants["row_per_program"]
    named = bucket(variant, {"H": 2560, "activation": "bfloat16"})
    assert tuning_point(variant, named).name == "T=8192,H=4096"  # 2560 and 4096 are one bucket


def test_auto_is_tuned_after_those_it_picks_among(steps: list[Step]) -> None:
    tuned = [step.variant for step in steps if step.kind == "tune" and step.op == "dequant_gemm"]
    assert set(tuned) == {v.name for v in OPS["dequant_gemm"].variants.values() if v.kind == "triton"}
    first = list(dict.fromkeys(tuned))
    assert first[-1] == "auto"


def test_changed_code_is_measured_anew(tmp_path: Path) -> None:
    def names(*changes: tuple[str, str]) -> set[str]:
        ops = OPS.with_variants_from(write_variant(tmp_path, *changes))
        return {step.key for step in make_steps(ops, H200, 16) if step.variant == "doubled"}

    before = names()
    assert names(("    mask = offs", "    # why\n    mask = offs")) == before
    assert not names(("offs < width", "offs <= width")) & before


def test_time_is_given_in_order() -> None:
    steps = [new_step("device", 10.0), new_step("precompile", 20.0), new_step("check", 5.0, "swiglu", "fused", "0")]
    assert [(s.kind, ends, within) for s, ends, within in schedule(steps, 30.0)] == [
        ("device", 10.0, True),
        ("precompile", 30.0, True),
        ("check", 35.0, False),
    ]


def test_a_step_goes_to_its_process_as_json() -> None:
    step = new_step("time", 1.0, "swiglu", "fused", "0", "T=1,I=8")
    assert step.key == "time swiglu.fused@0 T=1,I=8"
    assert step.title == "time swiglu.fused T=1,I=8"
    again = Step(**json.loads(json.dumps(asdict(step))))
    assert {**asdict(again), "points": ()} == asdict(step)
