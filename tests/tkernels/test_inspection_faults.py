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
def test_a_launcher_that_reads_values_and_catches_what_torch_raises_is_red_with_its_line(tmp_path: Path) -> None:
    shape = "    tokens, width = out.shape\n"
    caught = "    try:\n        gate_up.max().item()\n    except RuntimeError:\n        pass\n"
    rows = compiled(tmp_path, (shape, shape + caught))
    assert [row.status for row in rows] == ["ok", "failed"]
    assert rows[1].reason.startswith("launcher: HostAccessError: the launcher reads a tensor's values on the host")
    assert "by item at " in rows[1].reason
    assert "doubled.py:25 in launch" in rows[1].reason


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


def gemm(folder: Path, *faults: tuple[str, str], point: str = "engine") -> CompiledKernel:
    source = GEMM
    for before, after in faults:
        assert before in source
        source = source.replace(before, after)
    (folder / "matmul").mkdir(exist_ok=True)
    (folder / "matmul" / "plain.py").write_text(source)
    (row,) = compile_for(["sm_90"], ["matmul.plain"], ops=OPS.with_variants_from(folder), points=[point])
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


GELU = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tkernels import Config, Run, Variant
from tkernels.language import INTERPRETING


@triton.jit
def tanh(x):
    if INTERPRETING:
        return 2 * tl.sigmoid(2 * x) - 1
    else:
        return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def gelu_plain(out_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < size).to(tl.float32)
    out = x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))) / 2
    tl.store(out_ptr + offs, out.to(out_ptr.dtype.element_ty), mask=offs < size)


def launch(run: Run, out, x, tanh):
    run.launch(gelu_plain, (triton.cdiv(x.numel(), 1024),), out_ptr=out, x_ptr=x, size=x.numel(), BLOCK=1024)


VARIANT = Variant(wins="never", launch=launch, default={"": Config()}, deterministic=True, batch_invariant=True)
"""
_ON_A_GPU = "else:\n        return 2 * tl.sigmoid(2 * x) - 1"
_IN_ASSEMBLY = (
    "else:\n        return tl.inline_asm_elementwise("
    '"tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)'
)


@pytest.mark.parametrize(
    ("point", "instead", "found"),
    [
        ("fp32", _ON_A_GPU, ""),
        ("fp32", _IN_ASSEMBLY, "tanh.approx.f32"),
        ("engine", _IN_ASSEMBLY, ""),  # 11 bits are more than bf16 has
        ("fp32", "else:\n        return libdevice.fast_sinf(x)", "fast_sinf"),
        ("engine", "else:\n        return libdevice.fast_sinf(x)", "fast_sinf"),
        (
            "engine",
            "else:\n        return 2 * tl.sigmoid(2 * x) - 1 + tl.sum(x.to(tl.float16))",
            "sums in f16",
        ),
    ],
)
def test_what_only_a_gpu_approximates_is_red(tmp_path: Path, point: str, instead: str, found: str) -> None:
    """The interpreter's branch is right in all of them."""
    (tmp_path / "gelu").mkdir()
    source = GELU.replace(_ON_A_GPU, instead)
    (tmp_path / "gelu" / "plain.py").write_text(source)
    line = source.split("    else:\n")[0].count("\n") + 2
    (row,) = compile_for(["sm_80"], ["gelu.plain"], ops=OPS.with_variants_from(tmp_path), points=[point])
    assert gates.failures(row) == ([f"fewer digits than fp32's: plain.py:{line} {found}"] if found else [])


@pytest.mark.slow
def test_products_of_fp32_in_tf32_and_sums_in_fp16_are_red(tmp_path: Path) -> None:
    def lowered(point: str, *faults: tuple[str, str]) -> list[str]:
        return gates.failures(gemm(tmp_path, *faults, point=point))

    small = ("BLOCK_N=64, BLOCK_K=64", "BLOCK_N=64, BLOCK_K=16")  # fp32 products are unrolled on FMA units
    product = "dot(x, tl.trans(weight), sums)"
    assert lowered("fp32", small) == []
    assert lowered("fp32", small, (product, f"tl.{product}")) == [
        "fewer digits than fp32's: plain.py:20 product in tf32"
    ]
    assert lowered("fp32", small, (product, f'tl.{product[:-1]}, input_precision="tf32x3")')) == []
    assert lowered("engine", (product, f"tl.{product}")) == []
    halves = (
        "sums = " + product,
        "sums += tl.dot(x.to(tl.float16), tl.trans(weight).to(tl.float16), out_dtype=tl.float16)",
    )
    assert lowered("engine", halves) == ["fewer digits than fp32's: plain.py:20 sums in f16"]
    own_sums = "out_dtype=tl.float16 if x.dtype == tl.float16 else tl.float32"
    of_fp16 = (halves[0], f"sums += tl.dot(x, tl.trans(weight), {own_sums})")
    assert lowered("engine", of_fp16) == []
    assert lowered("fp16", of_fp16) == ["fewer digits than fp32's: plain.py:20 sums in f16"]
