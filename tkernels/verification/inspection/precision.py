"""What a compiled kernel computes with fewer digits than fp32 has, where the interpreter does not show it.

Read from Triton's own intermediate text (TTIR), which names products, sums, functions of libdevice and inline assembly
with their source lines; PTX is searched for what only inline assembly can bring in.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import triton

from tkernels.verification.inspection.accesses import source_frames

_LOC = re.compile(r"loc\(#(\w+)\)$")
# %acc = tt.dot %x, %y, %acc, inputPrecision = tf32 {maxNumImpreciseAcc = 64 : i32} : tensor<64x32xf32> * … -> …
_DOT = re.compile(r"\btt\.dot .*: tensor<(?:\d+x)*(\d+)x([a-z]\w*)> \* tensor<[\dx]+x(\w+)> -> tensor<[\dx]+x(\w+)>")
_PRECISION = re.compile(r"inputPrecision = (\w+)")
_UNIT_SUMS = re.compile(r"maxNumImpreciseAcc = (\d+)")
_SYMBOL = re.compile(r'\btt\.extern_elementwise .*symbol = "([^"]+)"')
_ASSEMBLY = re.compile(r'\btt\.elementwise_inline_asm "((?:[^"\\]|\\.)*)"')
_REDUCTION = re.compile(r'"tt\.(?:reduce|scan)"')
_SHORT_SUM = re.compile(r"\barith\.addf .* : (?:tensor<[\dx]+x)?(f16|bf16)\b")
_TF32_PRODUCT = re.compile(r"\bmma\S*\.tf32\b")

_AS_FP32 = ("ieee", "tf32x3", "bf16x6")
"""Products of fp32 operands that keep their 24 bits, or all but the last."""

_APPROXIMATION = re.compile(r"\b(?:(?:sin|cos|tanh|lg2)\.approx[\w.]*|\w+\.approx[\w.]*\.b?f16\w*)")
"""Instructions that are farther from the function than a few units of fp32's last digit: sin, cos and lg2 have an
absolute error, tanh 11 bits, and those of 16 bits no more than these. ex2, rcp, sqrt and rsqrt are what `tl` itself
compiles to."""

_FAST = re.compile(r"__nv_fast_(\w+)")
_OWN_SOURCE = f"{Path(triton.__file__).parent}{os.sep}"


def lowered_precision(ttir: str, ptx: str) -> tuple[str, ...]:
    """ "file.py:74 what" for every place that has fewer digits than fp32's arithmetic, sorted.

    - "product in tf32": operands of fp32, of which the matrix units take 11 bits.
    - "sums in f16": a product's accumulator, or a reduction's, of 16 bits; "sums in the units": fp8 products that
      Hopper's units sum, in about 14 bits, beyond one tile.
    - "fast_sinf", "tanh.approx.f32": an approximation of libdevice's or the hardware's, called by name.

    Args:
        ttir: The kernel's TTIR with locations.
        ptx: Its PTX; "" for a GPU that has none.
    """
    frames = source_frames(ttir)
    found = {f"{own_line(text, frames)} {what}" for text, what in _lowered_operations(ttir)}
    products = {precision for precision in _PRECISION.findall(ttir) if precision.startswith("tf32")}
    if not products and _TF32_PRODUCT.search(ptx):
        found.add("inline assembly: product in tf32")
    return tuple(sorted(found))


def _lowered_operations(ttir: str) -> Iterator[tuple[str, str]]:
    """(the line of TTIR whose location counts, what it lowers)."""
    short_sum = ""
    inside = False
    for text in ttir.splitlines():
        if _REDUCTION.search(text):
            inside, short_sum = True, ""
        elif inside and (found := _SHORT_SUM.search(text)):
            short_sum = found.group(1)
        elif inside and text.lstrip().startswith("})"):
            inside = False
            if short_sum:
                yield text, f"sums in {short_sum}"
        for what in _lowered_by(text):
            yield text, what


def _lowered_by(text: str) -> Iterator[str]:
    """What one operation lowers."""
    if dot := _DOT.search(text):
        yield from _lowered_by_dot(text, *dot.groups())
    elif symbol := _SYMBOL.search(text):
        yield from (f"fast_{name}" for name in _FAST.findall(symbol.group(1)))
    elif assembly := _ASSEMBLY.search(text):
        yield from dict.fromkeys(_APPROXIMATION.findall(assembly.group(1)))


def _lowered_by_dot(text: str, depth: str, left: str, right: str, sums: str) -> Iterator[str]:
    precision = _PRECISION.search(text)
    if "f32" in (left, right) and precision is not None and precision.group(1) not in _AS_FP32:
        yield f"product in {precision.group(1)}"
    if sums in ("f16", "bf16"):
        yield f"sums in {sums}"
    in_units = _UNIT_SUMS.search(text)
    if left.startswith("f8") and in_units is not None and int(in_units.group(1)) > int(depth):
        yield "sums in the units"


def own_line(text: str, frames: Mapping[str, tuple[str, ...]]) -> str:
    """ "file.py:74" of the innermost frame that is not Triton's own."""
    loc = _LOC.search(text)
    lines = frames.get(loc.group(1), ()) if loc else ()
    own = [line for line in lines if not line.startswith(_OWN_SOURCE)]
    return (own or list(lines) or ["?"])[0].rsplit("/", 1)[-1]
