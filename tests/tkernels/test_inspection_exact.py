"""What a GPU rounds otherwise than the interpreter is red in ops whose results are exact, and nothing else is."""

import pytest

from tkernels import OPS
from tkernels.verification.ahead_of_time import compile_for
from tkernels.verification.check import drawn_results
from tkernels.verification.inspection import gates
from tkernels.verification.inspection.rounding import other_roundings

QUANTIZED = """
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tkernels import Config, Run, Variant
from tkernels.language import INTERPRETING, nearest_even
from tkernels.ops.arguments import pointers
from tkernels.quantized.row_codes import reciprocal_of, unsupported_codes


@triton.jit
def quantize_tokens_plain(q_ptr, scale_ptr, x_ptr, static_scale_ptr, stride_q_m, stride_x_m, inputs, reciprocal,
                          BLOCK_K: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    x = tl.load(x_ptr + row * stride_x_m + offs, mask=offs < inputs, other=0.0).to(tl.float32)
    if static_scale_ptr is None:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) * reciprocal, 1.1754943508222875e-38)
    else:
        scale = tl.load(static_scale_ptr)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    products = x * inverse
    if static_scale_ptr is not None:
        products = tl.minimum(tl.maximum(products, -128.0), 127.0)
    codes = nearest_even(products)
    tl.store(q_ptr + row * stride_q_m + offs, codes.to(tl.int8), mask=offs < inputs)


def launch(run: Run, q, scale, x, dtype, static_scale):
    run.launch(quantize_tokens_plain, (x.shape[0],),
               **pointers("q[m] scale x[m] static_scale", q, scale, x, static_scale),
               inputs=x.shape[1], reciprocal=reciprocal_of(dtype), BLOCK_K=triton.next_power_of_2(x.shape[1]))


def supports(axes, device):
    return "int8 alone" if axes["codes"] != "int8" else None


VARIANT = Variant(wins="never", launch=launch, default={"": Config(num_warps=8)}, supports=supports,
                  deterministic=True, batch_invariant=True)
"""

INVERSE, PRODUCTS, CODES = "tl.div_rn(1.0, scale)", "products = x * inverse", "codes = nearest_even(products)"

PLANTED: dict[str, tuple[str, str, str]] = {
    "division": (INVERSE, "1.0 / scale", "division"),
    # The compiler makes one instruction of the product and the first sum: ties of the product are no ties of that.
    "magic_number": (CODES, "codes = (products + 12582912.0) - 12582912.0", "product in a sum"),
    "magic_number_in_a_tile": (
        PRODUCTS,
        "products = tl.reshape(tl.reshape(x * inverse, (1, BLOCK_K)) + 12582912.0, (BLOCK_K,)) - 12582912.0",
        "product in a sum",
    ),
    "assembly": (
        "    products =",
        "    if not INTERPRETING:\n        inverse = tl.inline_asm_elementwise("
        '"rcp.approx.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1)\n    products =',
        "rcp.approx.f32",
    ),
}
"""Faults that the interpreter does not see: before, after, what is said of them."""

ROUNDED_BY_NAME = """if INTERPRETING:
        products = x * inverse + 0.0
    else:
        products = libdevice.mul_rn(x, inverse) + 0.0"""
SILENT: dict[str, tuple[str, str]] = {
    "plain": (CODES, CODES),
    # Twice a number has no more digits than the number has: nothing is left to round.
    "doubled": (PRODUCTS, "products = tl.where(tl.abs(x) < 1, x * 2.0 - x, x) * inverse"),
    "rounded_by_name": (PRODUCTS, ROUNDED_BY_NAME),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each of these variants fails, all compiled in one go."""
    folder = tmp_path_factory.mktemp("exact") / "quantize_tokens"
    folder.mkdir()
    for name, (before, after, *_) in {**PLANTED, **SILENT}.items():
        assert before in QUANTIZED, before
        source = QUANTIZED.replace(before, after, 1).replace("quantize_tokens_plain", f"quantize_tokens_{name}")
        (folder / f"{name}.py").write_text(source)
    ops = OPS.with_variants_from(folder.parent)
    for name in PLANTED:
        statuses = {result.status for result in drawn_results(ops["quantize_tokens"].variants[name], 2)}
        assert statuses == {"ok"}, f"{name}: the interpreter is to see nothing"
    rows = compile_for(["sm_80"], [f"quantize_tokens.{name}" for name in (*PLANTED, *SILENT)], ops=ops)
    assert {row.status for row in rows} == {"ok"}
    return {row.variant: gates.failures(row) for row in rows}


@pytest.mark.parametrize("name", PLANTED)
def test_what_a_gpu_rounds_otherwise_is_red_where_results_are_exact(name: str, found: dict[str, list[str]]) -> None:
    what = PLANTED[name][2]
    (failure,) = found[name]
    assert failure.startswith(f"not rounded as an exact result's: {name}.py:")
    assert failure.endswith(f" {what}")


@pytest.mark.parametrize("name", SILENT)
def test_what_rounds_as_the_definition_says_is_not_reported(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


TTIR = """    %cst = arith.constant dense<2.000000e+00> : tensor<64xf32> loc(#l1)
    %c3 = arith.constant dense<3.000000e+00> : tensor<64xf32> loc(#l1)
    %x = tt.load %p, %m : tensor<64x!tt.ptr<f32>> loc(#l1)
    %h = tt.load %p2, %m : tensor<64x!tt.ptr<bf16>> loc(#l1)
    %w = arith.extf %h : tensor<64xbf16> to tensor<64xf32> loc(#l1)
    %i = arith.sitofp %n : tensor<64xi8> to tensor<64xf32> loc(#l1)
    %a = arith.mulf %x, %cst : tensor<64xf32> loc(#l1)
    %a1 = arith.addf %a, %x : tensor<64xf32> loc(#l2)
    %b = arith.mulf %w, %i : tensor<64xf32> loc(#l1)
    %b1 = arith.subf %x, %b : tensor<64xf32> loc(#l2)
    %c = arith.mulf %x, %c3 : tensor<64xf32> loc(#l1)
    %d = tt.reshape %c : tensor<64xf32> -> tensor<8x8xf32> loc(#l1)
    %e:2 = tt.split %d : tensor<8x8xf32> -> tensor<8xf32> loc(#l1)
    %f = arith.subf %g, %e#1 : tensor<8xf32> loc(#l3)
    %s = "tt.reduce"(%c) <{axis = 0 : i32}> ({
    ^bb0(%l: f32 loc(unknown), %r: f32 loc(unknown)):
      %t = arith.addf %l, %r : f32 loc(#l4)
      tt.reduce.return %t : f32 loc(#l4)
    }) : (tensor<64xf32>) -> f32 loc(#l5)
    %u = math.fma %x, %w, %c : tensor<64xf32> loc(#l6)
    %v = math.fma %w, %i, %c : tensor<64xf32> loc(#l2)
    %y = arith.divf %z, %z2 : f64 loc(#l2)
    %q = tt.precise_divf %x, %x : tensor<64xf32> loc(#l2)
    %o = tt.extern_elementwise %x {symbol = "__nv_nearbyintf"} : (tensor<64xf32>) -> tensor<64xf32> loc(#l2)
    %j = tt.extern_elementwise %x, %x {symbol = "__nv_fast_fdividef"} : (tensor<64xf32>) -> tensor<64xf32> loc(#l7)
    %k = arith.remf %x, %x : tensor<64xf32> loc(#l8)
#l1 = loc("/a/kernel.py":1:4)
#l2 = loc("/a/kernel.py":2:4)
#l3 = loc("/a/kernel.py":3:4)
#l4 = loc("/a/kernel.py":4:4)
#l5 = loc("/a/kernel.py":5:4)
#l6 = loc("/a/kernel.py":6:4)
#l7 = loc("/a/kernel.py":7:4)
#l8 = loc("/a/kernel.py":8:4)
"""


def test_roundings_are_told_from_what_is_exact_anyway() -> None:
    assert other_roundings(TTIR) == (
        "kernel.py:3 product in a sum", "kernel.py:4 product in a sum", "kernel.py:6 fma", "kernel.py:7 fast_fdividef",
        "kernel.py:8 division",
    )  # fmt: skip
