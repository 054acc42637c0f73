"""Programs as few as a GPU has room for, each with scratch of its own: silent where it is right."""

from pathlib import Path

import pytest

from tkernels import OPS
from tkernels.variant import Variant
from tkernels.verification.check import drawn_results
from tkernels.verification.draws import drawn_cases
from tkernels.verification.sanitizers.base import sanitized
from tkernels.verification.sanitizers.huge_sizes import check_sizes
from tkernels.verification.sanitizers.suite import SANITIZERS

KEPT_ROWS = """
import torch
import triton
import triton.language as tl

from tkernels import Buffer, Config, Run, Variant


@triton.jit
def swiglu_kept_rows(
    out_ptr, gate_up_ptr, scratch_ptr, stride_gate_up_t, stride_out_t, tokens, width, BLOCK: tl.constexpr
):
    # Each program has a row of scratch, in which it keeps the gates of the row that it is at.
    offs = tl.arange(0, BLOCK)
    scratch = scratch_ptr + tl.program_id(0) * BLOCK + offs
    for row in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        gates = gate_up_ptr + row * stride_gate_up_t
        for start in range(0, width, BLOCK):
            mask = start + offs < width
            gate = tl.load(gates + start + offs, mask=mask, other=0.0).to(tl.float32)
            tl.store(scratch, gate / (1 + tl.exp(-gate)), mask=mask)
            up = tl.load(gates + width + start + offs, mask=mask, other=0.0).to(tl.float32)
            out = tl.load(scratch, mask=mask, other=0.0) * up
            tl.store(out_ptr + row * stride_out_t + start + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, out: torch.Tensor, gate_up: torch.Tensor) -> None:
    tokens, width = out.shape
    run.launch(
        swiglu_kept_rows, (2 * run.device.multiprocessors,), out_ptr=out, gate_up_ptr=gate_up,
        scratch_ptr=run.workspace["scratch"], stride_gate_up_t=gate_up.stride(0), stride_out_t=out.stride(0),
        tokens=tokens, width=width, BLOCK=run.config["BLOCK"],
    )


VARIANT = Variant(
    wins="never", launch=launch, default={"": Config(BLOCK=64)},
    workspace=lambda axes, config, device: {
        "scratch": Buffer((2 * device.multiprocessors, config["BLOCK"]), torch.float32)
    },
    deterministic=True, batch_invariant=True,
)
"""

GRID = "(2 * run.device.multiprocessors,)"
SCRATCH = 'run.workspace["scratch"]'
OWN = "torch.empty(2 * run.device.multiprocessors, run.config['BLOCK'], device=out.device)"
STRIDE = (
    ("scratch_ptr, stride_gate", "scratch_ptr, stride_scratch, stride_gate"),
    ("tl.program_id(0) * BLOCK + offs", "tl.program_id(0) * stride_scratch + offs"),
    ("        tokens=tokens", f"        stride_scratch={SCRATCH}.stride(0), tokens=tokens"),
)
RIGHT = {
    "a grid of the device": (),
    "a grid of the rows or the device": ((GRID, "(min(tokens, 2 * run.device.multiprocessors),)"),),
    "scratch of the launcher": ((SCRATCH, OWN),),
    "scratch by its stride": STRIDE,
}
# Rows that are counted in 32 bits, at an offset that is made of a size: no faked stride shows it.
NARROW = (
    ("tl.program_id(0).to(tl.int64), tokens", "tl.program_id(0), tokens"),
    ("row * stride_gate_up_t", "row.to(tl.int64) * stride_gate_up_t"),
    ("row * stride_out_t", "row * width"),
)


def kept_rows(folder: Path, *changes: tuple[str, str]) -> Variant:
    source = KEPT_ROWS
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    (folder / "swiglu").mkdir()
    (folder / "swiglu" / "kept_rows.py").write_text(source)
    return OPS.with_variants_from(folder)["swiglu"].variants["kept_rows"]


@pytest.mark.parametrize("name", RIGHT)
def test_scratch_for_each_program_is_no_fault(name: str, tmp_path: Path) -> None:
    variant = kept_rows(tmp_path, *RIGHT[name])
    assert [str(one) for one in drawn_results(variant, 3) if one.status != "ok"] == []
    assert not any(sanitized(SANITIZERS["overflow"], variant, 4))
    assert not any(sanitized(SANITIZERS["race"], variant, 4))
    grown = [check_sizes(variant, case, config) for case, config in drawn_cases(variant, 4) if config is not None]
    assert any("T" in sizes for sizes in grown)


@pytest.mark.parametrize("name", RIGHT)
def test_an_offset_that_overflows_in_the_last_steps_of_a_walk_is_found(name: str, tmp_path: Path) -> None:
    variant = kept_rows(tmp_path, *RIGHT[name], *NARROW)
    axes = {"layout": "contiguous"}
    assert {one.status for one in drawn_results(variant, 3, fixed=axes)} == {"ok"}
    found = [one for one in sanitized(SANITIZERS["overflow"], variant, 8, fixed=axes) if one is not None]
    assert any("int32 overflow" in finding.message and "at T = " in finding.message for finding in found)
