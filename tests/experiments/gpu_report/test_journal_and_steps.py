"""What a report keeps, and what it plans: nothing is lost, nothing is done twice, the marks come first."""

import json
from pathlib import Path

import pytest

from experiments.gpu_report.journal import Journal, done_steps, facts, running_step
from experiments.gpu_report.marks import MARKS, PUBLISHED
from experiments.gpu_report.steps import Step, has_counters, make_steps, pending, report_points, schedule, tuning_point
from experiments.peers import with_peers
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.device import TARGETS
from tkernels.tuning import bucket

H200 = TARGETS["sm_90"]


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return make_steps(with_peers(OPS), H200, 16)


def test_a_line_that_was_cut_off_is_lost_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.lines() == []
    journal.append("a", "begin")
    journal.append("a", "fact", kind="rates", value=1.5)
    with open(journal.path, "a") as file:
        file.write('{"step": "a", "event": "fa')  # the machine went down here
    journal.append("a", "end", status="done")
    assert [line["event"] for line in journal.lines()] == ["begin", "fact", "end"]
    assert facts(journal.lines(), "a")[0]["value"] == 1.5
    assert facts(journal.lines(), "b") == []


def test_only_what_ended_well_is_done() -> None:
    lines = [
        {"step": "a", "event": "begin", "at": 1.0},
        {"step": "a", "event": "end", "at": 2.0, "status": "done"},
        {"step": "b", "event": "begin", "at": 3.0},
        {"step": "b", "event": "end", "at": 4.0, "status": "failed"},
        {"step": "c", "event": "begin", "at": 5.0},
    ]
    assert done_steps(lines) == {"a"}
    assert running_step(lines) == ("c", 5.0)
    assert running_step(lines[:4]) is None


def test_every_kind_of_step_is_planned_and_names_are_unique(steps: list[Step]) -> None:
    assert len({step.name for step in steps}) == len(steps)
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
        return {step.name for step in make_steps(ops, H200, 16) if step.variant == "doubled"}

    before = names()
    assert names(("    mask = offs", "    # why\n    mask = offs")) == before
    assert not names(("offs < width", "offs <= width")) & before


def test_time_is_given_in_order() -> None:
    steps = [Step("device", 10.0), Step("precompile", 20.0), Step("check", 5.0, "swiglu", "fused", "0")]
    assert [(s.kind, ends, within) for s, ends, within in schedule(steps, 30.0)] == [
        ("device", 10.0, True),
        ("precompile", 30.0, True),
        ("check", 35.0, False),
    ]
    assert pending(steps, {"device", "check swiglu.fused@0"}) == [steps[1]]


def test_a_step_is_one_line_of_json() -> None:
    step = Step("time", 1.0, "swiglu", "fused", "0", "T=1,I=8")
    assert json.loads(json.dumps(step.name)) == "time swiglu.fused@0 T=1,I=8"
    assert step.title == "time swiglu.fused T=1,I=8"
