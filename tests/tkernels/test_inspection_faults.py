"""Faults planted in a variant outside the tree: each turns its row red, by name, and the same variant without it does
not.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.verification.ahead_of_time import compile_for
from tkernels.verification.inspection import expected, gates
from tkernels.verification.inspection.rows import CompiledKernel

# A row of 14336 in blocks: 8 elements, or 16 bytes, a thread.
BLOCKED = (
    ("    offs = tl.arange(0, BLOCK)\n", "    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)\n"),
    ("(tokens,)", '(tokens, triton.cdiv(width, run.config["BLOCK"]))'),
    ("BLOCK=triton.next_power_of_2(width)", 'BLOCK=run.config["BLOCK"]'),
    (
        '{"": Config()}, configs=(Config(), Config(num_warps=8))',
        '{"": Config(BLOCK=1024)}, configs=(Config(BLOCK=1024),)',
    ),
)


def compiled(folder: Path, *faults: tuple[str, str], arch: str = "sm_90") -> Sequence[CompiledKernel]:
    write_variant(folder, *BLOCKED, *faults)
    return compile_for([arch], ["swiglu.doubled"], ops=OPS.with_variants_from(folder))


def test_a_clean_variant_passes(tmp_path: Path) -> None:
    (row,) = compiled(tmp_path)
    assert gates.failures(row) == []
    assert row.access_bytes == {"16": 1.0}
    assert row.grid == (8192, 14)


def test_a_spill_from_a_block_too_large_in_a_default_config_is_red(tmp_path: Path) -> None:
    (row,) = compiled(tmp_path, ("BLOCK=1024", "BLOCK=65536"))
    assert row.spill_bytes
    assert any(found == f"spills {row.spill_bytes} bytes" for found in gates.failures(row))
    assert gates.failing([row])[0].startswith("swiglu.doubled engine sm_90 (swiglu_doubled): ")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_a_narrowed_load_is_red_with_its_source_line(tmp_path: Path, arch: str) -> None:
    (row,) = compiled(tmp_path, ("+ width + offs", "+ width - 1 + offs"), arch=arch)
    assert row.spill_bytes == 0
    (found,) = gates.failures(row)
    before = (tmp_path / "swiglu" / "doubled.py").read_text().split("    up = ")[0]
    line = before.count("\n") + 1
    assert f"doubled.py:{line} bf16 2" in found


GEMM = """
import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot


@triton.jit
def matmul_plain(out_ptr, x_ptr, weight_ptr, stride_x_m, stride_weight_n, inputs, outputs,
                 BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        x = tl.load(x_ptr + rows[:, None] * stride_x_m + start + depth[None, :])
        weight = tl.load(weight_ptr + columns[:, None] * stride_weight_n + start + depth[None, :])
        sums = dot(x, tl.trans(weight), sums)
    tl.store(out_ptr + rows[:, None] * outputs + columns[None, :], sums.to(out_ptr.dtype.element_ty))


def launch(run: Run, out, x, weight, bias):
    run.launch(
        matmul_plain, (x.shape[0] // run.config["BLOCK_M"], weight.shape[0] // 64), out_ptr=out, x_ptr=x,
        weight_ptr=weight, stride_x_m=x.stride(0), stride_weight_n=weight.stride(0), inputs=x.shape[1],
        outputs=weight.shape[0], BLOCK_M=run.config["BLOCK_M"], BLOCK_N=64, BLOCK_K=64,
    )


VARIANT = Variant(wins="never", launch=launch, default={"": Config(BLOCK_M=64)},
                  configs=(Config(BLOCK_M=64),), deterministic=True, batch_invariant=True)
"""


def gemm(folder: Path, *faults: tuple[str, str]) -> CompiledKernel:
    source = GEMM
    for before, after in faults:
        assert before in source
        source = source.replace(before, after)
    (folder / "matmul").mkdir(exist_ok=True)
    (folder / "matmul" / "plain.py").write_text(source)
    (row,) = compile_for(["sm_90"], ["matmul.plain"], ops=OPS.with_variants_from(folder))
    return row


@pytest.mark.slow
def test_a_lost_wgmma_is_red(tmp_path: Path) -> None:
    clean = gemm(tmp_path)
    assert gates.failures(clean) == []
    assert "HGMMA" in clean.matrix_instructions
    small = gemm(tmp_path, ("Config(BLOCK_M=64)", "Config(BLOCK_M=16)"))
    assert gates.failures(small) == ["tile of 16 rows, 64 are the least", "no HGMMA"]
    slow = gemm(
        tmp_path,
        (
            "sums = dot(x, tl.trans(weight), sums)",
            "sums += tl.sum(x.to(tl.float32), 1)[:, None] + tl.sum(weight.to(tl.float32), 1)",
        ),
    )
    assert gates.failures(slow) == ["no HGMMA"]
    assert expected.regressions(clean, slow) == ["lost HGMMA, has no matrix instruction"]


def test_a_block_with_too_much_shared_memory_is_a_failed_row(tmp_path: Path) -> None:
    row = gemm(tmp_path, ("Config(BLOCK_M=64)", "Config(BLOCK_M=128, num_stages=16)"))
    assert row.status == "failed"
    assert "232448 is the most" in row.reason


def test_a_fault_in_a_built_in_variant_is_worse_than_the_expected_table() -> None:
    name = next(iter(v for v in OPS["swiglu"].variants.values() if v.kind == "triton")).name
    (row,) = compile_for(["sm_90"], [f"swiglu.{name}"])
    narrowed = replace(row, access_bytes={"2": 1.0}, narrow=("fused.py:1 bf16 2",))
    assert expected.regressions(row, narrowed) == [
        "narrower: bf16 2", "0% of the main loop's bytes in 16-byte accesses, 100% before",
    ]  # fmt: skip
