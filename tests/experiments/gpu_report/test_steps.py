"""What a report plans: nothing is done twice, the marks come first, changed code is measured anew."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_report.engine_marks import RUNS
from experiments.gpu_report.journal import OUT_OF_TIME, Journal, finished_keys
from experiments.gpu_report.marks import MARKS, PUBLISHED
from experiments.gpu_report.steps import Step, new_step
from experiments.gpu_report.worker import step_of
from experiments.gpu_report.worth import (
    FIRST_RUNS,
    LATER,
    has_counters,
    make_steps,
    models_to_draw,
    report_points,
    tuning_points,
)
from experiments.peers import is_peer, with_peers
from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.buckets import bucket
from tkernels.device import TARGETS
from tkernels.tuning import candidates

H200 = TARGETS["sm_90"]


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return make_steps(with_peers(OPS), H200)


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
    assert Journal.of({}, rows).left([device, check, mark]) == [mark]


def test_what_failed_is_tried_after_what_is_worth_the_same() -> None:
    one, other, less = new_step("device", 1.0), new_step("mark", 1.0, point="x"), new_step("check", 1.0, "a", worth=2)
    journal = Journal()
    journal.note(one, 1.0, f"{OUT_OF_TIME}timeout")
    assert journal.left([one, other, less]) == [one, other, less]
    journal.note(one, 1.0, "killed by SIGSEGV")
    assert journal.left([one, other, less]) == [other, one, less]
    assert Journal.of(json.loads(json.dumps(journal.as_meta())), ()).left([one, other, less]) == [other, one, less]


def test_every_kind_of_step_is_planned_and_names_are_unique(steps: list[Step]) -> None:
    assert len({step.key for step in steps}) == len(steps)
    kinds = list(dict.fromkeys(step.kind for step in steps))
    assert kinds == [
        "device",
        "stress",
        "rerun",
        "verify",
        "tune",
        "time",
        "engine",
        "mark",
        "check",
        "batch",
        "sanitizer",
    ]
    triton = {(o.name, v.name) for o in OPS.values() for v in o.variants.values() if v.kind == "triton"}
    for kind in ("check", "sanitizer"):
        assert {(s.op, s.variant) for s in steps if s.kind == kind} == triton
    assert {(s.op, s.variant) for s in steps if s.kind == "tune"} <= triton
    invariant = {(op, name) for op, name in triton if OPS[op].variants[name].batch_invariant}
    assert {(s.op, s.variant) for s in steps if s.kind == "batch"} == invariant
    timed = {(s.op, s.point, s.variant) for s in steps if s.kind == "time"}
    for op in with_peers(OPS).values():
        assert timed >= {(op.name, point, name) for point in report_points(op.contract) for name in op.variants}


def test_what_the_marks_need_comes_before_everything_else(steps: list[Step]) -> None:
    first = [step for step in steps if step.worth == 0]
    assert steps[: len(first)] == first
    second = [step for step in steps[len(first) :] if step.worth == 1]
    assert steps[len(first) :][: len(second)] == second
    timed, verified = (
        {(step.op, step.point, step.variant) for step in (*first, *second) if step.kind == kind}
        for kind in ("time", "verify")
    )
    ops = with_peers(OPS)
    for mark in MARKS:  # each of them exists, and so do the peers it names
        assert mark.point in report_points(OPS[mark.op].contract)
        peers = set(mark.peers) & set(ops[mark.op].variants)
        ours = {name for name, one in ops[mark.op].variants.items() if one.kind == "triton" and not is_peer(one)}
        assert peers
        assert {(*mark.peers_place, name) for name in peers} <= timed
        assert {(mark.op, mark.point, name) for name in ours} <= timed
        assert {(mark.op, mark.point, name) for name in ours} <= verified
        added = OPS[mark.plus].variants.values() if mark.plus else ()
        assert {(mark.plus, mark.point, one.name) for one in added if one.kind == "triton"} <= timed
    assert {op for op, _, _ in timed} == {op for mark in MARKS for op, _ in mark.places}
    assert {step.op for step in second if step.kind == "time"} == set(LATER)
    assert [step.point for step in first if step.kind == "mark"] == list(FIRST_RUNS)
    assert [step.point for step in steps if step.kind == "mark"] == list(RUNS)
    for published in PUBLISHED:
        assert published.point in report_points(OPS[published.op].contract)
        assert published.peer in ops[published.op].variants


def test_every_marked_kernel_is_tuned_at_a_point_of_its_bucket_before_it_is_timed(steps: list[Step]) -> None:
    for place, step in enumerate(steps):
        if step.worth > 1 or step.kind != "tune":
            continue
        variant = OPS[step.op].variants[step.variant]
        stands_for = tuning_points(variant, H200)[step.point]
        assert bucket(variant, stands_for.axes) == step.point
        met = [config for config in candidates(variant, "sm_90") if config.unmet_on("sm_90") is None]
        assert [dict(piece.axes) for piece in step.pieces] == [stands_for.axes] * len(met)
        later = {(one.variant, one.kind) for one in steps[place:] if one.op == step.op}
        assert (step.variant, "time") in later


def test_the_last_arrivers_are_stressed_and_rerun_first(steps: list[Step]) -> None:
    stressed = [f"{s.op}.{s.variant}" for s in steps if s.kind == "stress"]
    assert "paged_decode.last_arriver" in stressed
    assert "dequant_gemm.auto" not in stressed  # it runs those of others
    assert [s.kind for s in steps[: 1 + 2 * len(stressed)]] == ["device", *["stress", "rerun"] * len(stressed)]
    assert not has_counters(OPS["rms_norm"].variants["row_per_program"], H200)


def test_auto_is_tuned_after_those_it_picks_among(steps: list[Step]) -> None:
    tuned = [step.variant for step in steps if step.kind == "tune" and step.op == "dequant_gemm" and step.worth == 0]
    assert list(dict.fromkeys(tuned))[-1] == "auto"


def test_a_peer_that_builds_its_kernels_has_a_process_of_its_own_and_builds_them_before(steps: list[Step]) -> None:
    compiled = [s for s in steps if s.kind == "time" and s.variant == "torch_compile"]
    assert {s.process for s in compiled} == {f"{s.op}.torch_compile" for s in compiled}
    assert all([piece.what for piece in s.pieces] == ["peer"] for s in compiled)
    absent = [s for s in steps if s.variant == "flashinfer"]
    assert "flashinfer is not installed" in {s.refusal for s in absent}
    assert all(s.refusal and not s.pieces for s in absent)
    ours = [s for s in steps if s.kind == "time" and s.variant in ("one_pass", "sdpa_flash") and s.op == "paged_decode"]
    assert {s.process for s in ours} == {"paged_decode"}


def test_weights_are_drawn_early_for_the_first_steps_that_need_some(steps: list[Step]) -> None:
    assert models_to_draw(steps) == ["Qwen3-0.6B", "Qwen3-4B"]
    assert models_to_draw([step for step in steps if step.worth == 2]) == []


def test_changed_code_is_measured_anew(tmp_path: Path) -> None:
    def names(*changes: tuple[str, str]) -> set[str]:
        ops = OPS.with_variants_from(write_variant(tmp_path, *changes))
        return {step.key for step in make_steps(ops, H200) if step.variant == "doubled"}

    before = names()
    assert names(("    mask = offs", "    # why\n    mask = offs")) == before
    assert not names(("offs < width", "offs <= width")) & before


def test_a_step_goes_to_its_process_as_json(steps: list[Step]) -> None:
    step = new_step("time", 1.0, "swiglu", "fused", "0", "T=1,I=8")
    assert step.key == "time swiglu.fused@0 T=1,I=8"
    assert step.title == "time swiglu.fused T=1,I=8"
    tuned = next(step for step in steps if step.kind == "tune")
    again = step_of(json.loads(json.dumps(asdict(tuned))))
    assert asdict(again) == json.loads(json.dumps(asdict(tuned)))
    assert [piece.key for piece in again.pieces] == [piece.key for piece in tuned.pieces]
