"""Rows that are faint, zero or have outliers: what a norm makes of its epsilon, and of its row, must show."""

from pathlib import Path

import pytest
import torch

from tests.tkernels.outside import write_copy
from tkernels import OPS
from tkernels.inputs import ROW_KINDS, Draws
from tkernels.verification.check import check_case
from tkernels.verification.draws import drawn_cases

CPU = torch.device("cpu")
ROOT = "tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)"
SUM = "tl.rsqrt(tl.sum(total * total, axis=0) / hidden + eps)"

FAULTS = {
    "no epsilon": ("rms_norm.row_per_program", ROOT, "tl.rsqrt(tl.sum(x * x, axis=0) / hidden)"),
    "epsilon inside the mean": ("rms_norm.row_per_program", ROOT, "tl.rsqrt((tl.sum(x * x, axis=0) + eps) / hidden)"),
    "epsilon on the root": (
        "rms_norm.row_per_program",
        ROOT,
        "(1 / (tl.sqrt(tl.sum(x * x, axis=0) / hidden) + eps))",
    ),
    "epsilon as a lower bound": (
        "rms_norm.row_per_program",
        ROOT,
        "tl.rsqrt(tl.maximum(tl.sum(x * x, axis=0) / hidden, eps))",
    ),
    "the usual epsilon, whatever it is told": ("rms_norm.row_per_program", ROOT, ROOT.replace("eps", "1e-6")),
    "the other usual epsilon": ("rms_norm.row_per_program", ROOT, ROOT.replace("eps", "1e-5")),
    "another epsilon": ("rms_norm.row_per_program", ROOT, ROOT.replace("eps", "1e-8")),
    "no epsilon for a row of zeros alone": (
        "add_rms_norm.row_per_program",
        SUM,
        "tl.rsqrt(tl.sum(total * total, axis=0) / hidden + tl.where(tl.max(tl.abs(total), axis=0) > 0, eps, 0.0))",
    ),
    "squares of an outlier leave their type": (
        "add_rms_norm.row_per_program",
        SUM,
        "tl.rsqrt(tl.sum(tl.minimum(total * total, 1e6), axis=0) / hidden + eps)",
    ),
    "no epsilon per head": ("qk_norm_rope.head_tile", "squares / HEAD_DIM + eps", "squares / HEAD_DIM"),
    "a scale of what is positive alone": (
        "quantize_tokens.row_per_program",
        "tl.max(tl.abs(x), axis=0)",
        "tl.max(x, axis=0)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_faint_zero_or_uneven_rows_is_found_within_20_draws(fault: str, tmp_path: Path) -> None:
    original, before, after = FAULTS[fault]
    op = original.split(".")[0]
    wrong = OPS.with_variants_from(write_copy(tmp_path, original, "planted", (before, after)))[op].variants["planted"]
    assert any(check_case(wrong, *drawn, offsets=False).status != "ok" for drawn in drawn_cases(wrong, 20))


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "gelu", "swiglu"])
def test_rows_of_every_kind_are_drawn(op: str) -> None:
    kinds = {case.axes["values"] for case, _ in drawn_cases(OPS[op].variants["torch"], 20)}
    assert set(ROW_KINDS) <= kinds


def test_rows_are_as_their_kind_says() -> None:
    rows = {kind: Draws(0, CPU).normal((4, 64), torch.float16, kind).double() for kind in ROW_KINDS}
    assert float(rows["faint"].square().mean(-1).max()) < 1e-9
    assert rows["faint"].count_nonzero(dim=-1).tolist() == [64, 0, 64, 0]
    assert {bool(sign) for sign in torch.signbit(rows["faint"][1])} == {False, True}
    assert all(1 <= int(count) <= 8 for count in (rows["outlier"].abs() > 1000).sum(-1))
