"""Where a compiled kernel rounds otherwise than its text says and the interpreter does, in ops whose results are exact.

The interpreter rounds every operation once, to nearest. A GPU divides fp32 to two units in the last place, approximates
functions, and makes one instruction of a product and the sum that takes it (Triton's `enable_fp_fusion`, which no
launch turns off), so that the product is not rounded. Read from TTIR, where none of this has happened yet: what a
compiler may do, one version or another of it will.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tkernels.verification.inspection.accesses import source_frames
from tkernels.verification.inspection.precision import own_line

# %x, %y = arith.mulf %a, %b : tensor<64xf32> loc(#loc7); a region's first line has no loc.
_OPERATION = re.compile(r'^\s*((?:%[\w$.-]+(?::\d+)?(?:, )?)+) = "?([\w.]+)"?(.*)$')
_VALUE = re.compile(r"%[\w$.-]+")  # of several results, the operation, whichever is meant
_TYPE = re.compile(r"(?:tensor<[\dx]+x)?(f8\w+|bf16|f16|f32|f64|i\d+)\b")
_NUMBER = re.compile(r"(?:dense<)?(-?[\d.]+(?:[eE][+-]?\d+)?|0x[0-9A-Fa-f]+)>? :")

_SAME_ELEMENTS = (
    "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.join", "tt.split", "tt.cat",
    "tt.unsplat", "arith.negf", "math.absf",
)  # fmt: skip
"""What gives a number on as it is, but for its sign: none of them keeps a product from the sum behind it."""

_DIGITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "f8E4M3FN": 4, "f8E5M2": 3}
"""Binary digits of a significand."""

_APPROXIMATE = re.compile(r"math\.(exp2?|expm1|log(?:2|10|1p)?|r?sqrt|cbrt|sin|cos|tan\w*|\w*sinh?|erf|powf)$")
_ASSEMBLED = re.compile(r"\b(?:\w+\.approx|div\.full|fma)\.[\w.]*\w")
_SYMBOL = re.compile(r'symbol = "(?:__nv_|__ocml_|llvm\.)?([\w.]+)"')
_ROUNDED = re.compile(
    r"(?:f?(?:add|sub|mul|div|rcp|sqrt|recip)|[df](?:add|sub|mul|div|rcp|sqrt))_r[nzud].*"
    r"|(?:nearbyint|rint|round|trunc|floor|ceil|fabs|fmin|fmax|copysign|ldexp|scalbn|isnan|isinf|finite|signbit)\w*"
    r"|(?:float|double|int|uint|ll|ull|half)\w*2\w+|\w+_as_\w+"
)
"""Functions of libdevice and of AMD's library that round as their name says, or not at all."""


@dataclass(frozen=True)
class _Operation:
    name: str
    operands: tuple[str, ...]
    text: str


@dataclass
class _Values:
    """What gave each value of one function."""

    made_by: dict[str, _Operation] = field(default_factory=dict)

    def origin(self, value: str) -> _Operation | None:
        """The operation that computed a value, behind all that only give it on."""
        made = self.made_by.get(value)
        while made is not None and made.name in _SAME_ELEMENTS and len(made.operands) == 1:
            made = self.made_by.get(made.operands[0])
        return made

    def digits(self, value: str) -> int:
        """How many binary digits a value's significand has at most."""
        made = self.origin(value)
        if made is None:
            return _DIGITS["f64"]
        types = _TYPE.findall(made.text.split(" loc(")[0])
        if made.name == "arith.constant":
            return _digits_of_constant(made.text)
        source = types[0] if types else "f64"
        if made.name in ("arith.sitofp", "arith.uitofp"):
            return int(source[1:])
        return _DIGITS.get(source, _DIGITS["f64"])  # of a cast, what it is from

    def rounds(self, operands: Sequence[str], kind: str) -> bool:
        """Whether a product of these has more digits than its type; but for what is below the normal range."""
        one, other = (self.digits(operand) for operand in operands[:2])
        return (max(one, other) if min(one, other) == 1 else one + other) > _DIGITS.get(kind, 0)

    def is_rounded_product(self, value: str) -> bool:
        made = self.made_by.get(value)
        if made is None:
            return False
        if made.name in _SAME_ELEMENTS:
            return any(self.is_rounded_product(operand) for operand in made.operands)
        return made.name == "arith.mulf" and self.rounds(made.operands, _kind(made.text))


def other_roundings(ttir: str) -> tuple[str, ...]:
    """ "file.py:74 what" for every operation whose bits on a GPU may be others than the interpreter's, sorted.

    - "division": `/` or `%` of floats, where `tl.div_rn` rounds.
    - "product in a sum": of one that has more digits than its type, whose rounding a fused multiply-add leaves out.
    - "fma": the same by name, which the interpreter rounds twice.
    - "exp2", "rsqrt", "rcp.approx.f32", "fdividef": a function that is approximated.

    Args:
        ttir: The kernel's TTIR with locations.
    """
    frames = source_frames(ttir)
    return tuple(sorted({f"{own_line(text, frames)} {what}" for text, what in _operations(ttir)}))


def _operations(ttir: str) -> Iterator[tuple[str, str]]:
    """(the line of TTIR whose location counts, what is rounded otherwise)."""
    values = _Values()
    reduced: tuple[str, ...] | None = None  # the operands of the reduction or scan whose region this is
    for text in ttir.splitlines():
        if "tt.func" in text:
            values = _Values()
        if reduced is not None and text.lstrip().startswith("})"):
            reduced = None
        found = _OPERATION.match(text)
        if found is None:
            continue
        results, name, rest = found.groups()
        operands = tuple(_VALUE.findall(rest))
        made = _Operation(name, operands, rest)
        values.made_by.update((result, made) for result in _VALUE.findall(results))
        if name in ("tt.reduce", "tt.scan"):
            reduced = operands
        summed = reduced if reduced is not None else operands
        for what in _rounded_otherwise(made, summed, values):
            yield text, what


def _rounded_otherwise(made: _Operation, summed: Sequence[str], values: _Values) -> Iterator[str]:
    """What one operation does that the interpreter does not. summed: what an addition adds up."""
    kind = _kind(made.text)
    if made.name in ("arith.divf", "arith.remf") and kind != "f64":
        yield "division"
    elif made.name in ("arith.addf", "arith.subf") and any(values.is_rounded_product(one) for one in summed):
        yield "product in a sum"
    elif made.name == "math.fma" and values.rounds(made.operands, kind):
        yield "fma"
    elif function := _APPROXIMATE.match(made.name):
        yield function.group(1)
    elif made.name == "tt.extern_elementwise" and (symbol := _SYMBOL.search(made.text)):
        if not _ROUNDED.fullmatch(symbol.group(1)):
            yield symbol.group(1)
    elif made.name == "tt.elementwise_inline_asm":
        yield from dict.fromkeys(_ASSEMBLED.findall(made.text))


def _kind(text: str) -> str:
    """The element type of an operation: the last that its line names."""
    types = _TYPE.findall(text.split(" loc(")[0])
    return types[-1] if types else ""


def _digits_of_constant(text: str) -> int:
    """Of a constant that is one number everywhere; of others the most that there are."""
    found = _NUMBER.search(text)
    if found is None:
        return _DIGITS["f64"]
    number, kind = found.group(1), _kind(text)
    if number.startswith("0x"):
        bits: Mapping[str, tuple[type, type]] = {"f32": (np.uint32, np.float32), "f64": (np.uint64, np.float64)}
        if kind not in bits:
            return _DIGITS["f64"]
        integers, floats = bits[kind]
        value = float(np.array(int(number, 16), dtype=integers).view(floats))
    else:
        value = float(np.float32(number)) if kind == "f32" else float(number)
    if value == 0 or not math.isfinite(value):
        return 1
    significand, _ = math.frexp(abs(value))
    whole = int(significand * 2**53)
    return (whole // (whole & -whole)).bit_length()
