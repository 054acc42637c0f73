"""The resource table: of the code that ran, or not there."""

from typing import Any

import pytest

import tkernels
from experiments.reporting.resources import STAND_IN, resources_of
from tkernels.source_hash import source_hash
from tkernels.verification.inspection import expected


def environment(source: str, **device: Any) -> dict[str, Any]:
    about = {"name": "some CPU", "arch": "x86_64", **device}
    return {"kernels": {"swiglu.fused": source, "swiglu.torch": None}, "versions": {"triton": "3.7.1"}, "device": about}


@pytest.fixture
def fused() -> str:
    return source_hash(tkernels.OPS["swiglu"].variants["fused"].kernels)


def test_the_expected_rows_are_of_todays_code(fused: str) -> None:
    table, notes = resources_of(environment(fused, name="NVIDIA H200", arch="sm_90"))
    assert table is not None
    assert notes == []
    line = table.lines[0]
    assert not isinstance(line, str)
    shown = dict(zip((column.name for column in table.columns), (cell.text for cell in line), strict=True))
    row = next(
        one for one in expected.read(expected.table_path("3.7.1")).values()
        if (one.op, one.variant, one.arch, one.point) == ("swiglu", "fused", "sm_90", "engine")
    )  # fmt: skip
    assert shown["registers"] == str(row.registers)
    assert shown["spilled"] == str(row.spill_bytes)


def test_code_that_changed_has_no_row(fused: str) -> None:
    table, notes = resources_of(environment("0" * len(fused), arch="sm_90"))
    assert table is None
    assert "Not in the expected table of Triton 3.7.1 as the code was then, for sm_90: swiglu.fused" in notes[0]


def test_a_cpu_is_told_what_the_code_would_be_elsewhere(fused: str) -> None:
    table, notes = resources_of(environment(fused))
    assert table is not None
    assert STAND_IN in table.title
    assert "Nothing of it was measured" in notes[0]


def test_without_kernels_there_is_nothing_to_show() -> None:
    assert resources_of({"kernels": {"swiglu.torch": None}}) == (None, ["No variant of this run has a Triton kernel."])
    assert resources_of({})[0] is None
    table, notes = resources_of({"kernels": {"swiglu.fused": "0" * 16}})
    assert table is None
    assert "(unknown)" in notes[-1]
