"""What the author of a kernel is told of an error: what, the file, the line, the expression, and what helps."""

from pathlib import Path

import pytest

from tests.tkernels.outside import write_variant
from tkernels import OPS
from tkernels.verification.check import CheckResult, check_case

POINT = {"T": 4, "I": 33, "activation": "float16", "layout": "contiguous", "values": "ordinary"}

UP = "up = tl.load(gate_up_ptr + row * stride_gate_up_t + width + offs, mask=mask, other=0.0).to(tl.float32)"
STORE = "tl.store(out_ptr + row * stride_out_t + offs, out.to(out_ptr.dtype.element_ty), mask=mask)"
OUT = "out = gate / (1 + tl.exp(-gate)) * up * FACTOR"
SHAPE = "tokens, width = out.shape"


def after(line: str, more: str) -> tuple[str, str]:
    return line, f"{line}\n    {more}"


# The mistake -> (what it is in the source, what is said, the expression that is named, a part of the hint).
MISTAKES: dict[str, tuple[list[tuple[str, str]], str, str, str]] = {
    "an int32 offset": (
        [("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")],
        "int32 overflow", "row * stride_gate_up_t", ".to(tl.int64) on the program id",
    ),
    "a load without a mask": (
        [(UP, UP.replace(", mask=mask, other=0.0", ""))],
        "AddressError: swiglu_doubled: load of 2 bytes outside every argument",
        "tl.load(gate_up_ptr + row * stride_gate_up_t + width + offs)", "it has no mask=",
    ),
    "a store without a mask": (
        [(STORE, STORE.replace(", mask=mask", ""))],
        "store of 2 bytes outside every argument", STORE.replace(", mask=mask", ""), "it has no mask=",
    ),
    "a mask of the wrong bound": (
        [(UP, UP.replace("mask=mask", "mask=offs < width + 1"))],
        "load of 2 bytes outside every argument", UP.replace("mask=mask", "mask=offs < width + 1")[5:-15],
        "check mask, stride",
    ),
    "blocks of two shapes": (
        [after(OUT, "out = out + tl.arange(0, 2 * BLOCK)")],
        "incompatible dimensions", "out + tl.arange(0, 2 * BLOCK)", "[:, None]",
    ),
    "a block size that is no constexpr": (
        [("BLOCK: tl.constexpr", "BLOCK")],
        "must be of type tl.constexpr", "tl.arange(0, BLOCK)", "BLOCK: tl.constexpr",
    ),
    "a block size that is no power of 2": (
        [("triton.next_power_of_2(width)", "width")],
        "power of 2", "tl.arange(0, BLOCK)", "triton.next_power_of_2",
    ),
    "a name that tl has not": (
        [("tl.exp(-gate)", "tl.expp(-gate)")], "no attribute 'expp'", "tl.expp", "did you mean 'exp'?",
    ),
    "arithmetic on bf16": (
        [after(OUT, "out = gate.to(tl.bfloat16) * up.to(tl.bfloat16)")],
        "widen with .to(tl.float32) first", "gate.to(tl.bfloat16) * up.to(tl.bfloat16)", "",
    ),
    "a product of the wrong shapes": (
        [after(OUT, "out = tl.dot(gate[None, :], up[None, :])")],
        "equal reduction dimensions", "tl.dot(gate[None, :], up[None, :])", "[M, K] by [K, N]",
    ),
    "a product of two dtypes": (
        [after(OUT, "z = tl.dot(tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float16))")],
        "same dtype", "tl.dot(tl.zeros((16, 16), tl.float32), tl.zeros((16, 16), tl.float16))", ".to() on one",
    ),
    "torch in a kernel": (
        [("tl.exp(-gate)", "torch.exp(-gate)")], "must be Tensor", "torch.exp(-gate)", "those of tl",
    ),
    "a dtype of torch": (
        [(UP, UP.replace("tl.float32", "torch.float32"))], "'torch.dtype'", ".to(torch.float32)", "as tl.float32",
    ),
    "a float offset": (
        [("tl.program_id(0).to(tl.int64)", "tl.program_id(0) / 1")],
        "invalid operands", "gate_up_ptr + row * stride_gate_up_t", "// where it is /",
    ),
    "a load from no pointer": (
        [(UP, UP.replace("tl.load(gate_up_ptr", "tl.load(0"))],
        "Unsupported ptr type", "tl.load(0 + row", "x_ptr + offs",
    ),
    "a block stored to one address": (
        [(STORE, "tl.store(out_ptr + row * stride_out_t, out)")],
        "cannot be block type", "tl.store(out_ptr + row * stride_out_t, out)", "add the block's offsets",
    ),
    "zeros without a dtype": (
        [after(OUT, "out += tl.zeros([BLOCK])")], "'dtype'", "tl.zeros([BLOCK])", "a shape and a dtype",
    ),
    "an axis too many": (
        [after(OUT, "out += tl.sum(out, axis=1)")], "axis 1 out of bounds", "tl.sum(out, axis=1)", "first axis is 0",
    ),
    "a block that is indexed": ([after(OUT, "out += gate[0]")], "not iterable", "gate[0]", "no numbered elements"),
    "a branch on a block": (
        [after(OUT, "if gate > 0:\n        out = out * 1.0")], "neither true nor false", "gate > 0", "",
    ),
    "None for a number": ([("width=width", "width=None")], "cannot convert None", "offs < width", "HAS_BIAS"),
    "an unknown name": ([("tl.exp(-gate)", "tl.exp(-gates)")], "'gates' is not defined", "gates", "its parameters"),
    "a parameter that is not given": (
        [("width=width, ", "")], "missing 1 required positional argument: 'width'", "run.launch(", "every parameter",
    ),
    "an argument that the kernel has not": (
        [("width=width", "width=width, widht=3")], "no parameter 'widht'", "run.launch(", "",
    ),
    "a grid that is no tuple": ([("(tokens,)", "(tokens)")], "not iterable", "run.launch(", "a grid is a tuple"),
    "a grid of floats": ([("(tokens,)", "(tokens / 2,)")], "'float' object", "run.launch(", "triton.cdiv"),
    "a workspace that is not declared": (
        [(SHAPE, f"{SHAPE}\n    part = run.workspace['part']")], "KeyError", "run.workspace['part']", "workspace=",
    ),
    "a method that a tensor has not": (
        [(SHAPE, f"{SHAPE}\n    n = out.strides(0)")], "no attribute 'strides'", "out.strides", "",
    ),
}  # fmt: skip


def fail(folder: Path, changes: list[tuple[str, str]]) -> CheckResult:
    variant = OPS.with_variants_from(write_variant(folder, *changes))["swiglu"].variants["doubled"]
    result = check_case(variant, variant.contract.case(POINT, 0))
    assert result.status == "failed"
    return result


def line_of(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_said_with_its_line_expression_and_hint(mistake: str, tmp_path: Path) -> None:
    changes, what, expression, hint = MISTAKES[mistake]
    result = fail(tmp_path, changes)
    said, place, *rest = result.reason.split("\n  ")
    file = tmp_path / "swiglu" / "doubled.py"
    where = "launch" if expression.startswith(("run.", "out.strides")) else "swiglu_doubled"
    assert what in said
    assert place.startswith(f"at {file}:{line_of(file, expression)} in {where}: ")
    assert expression in place
    assert "InterpreterError" not in result.reason
    assert len(rest) == bool(hint)
    assert hint in "".join(rest)
    assert str(result).endswith(result.replay)


HELPER = """
@triton.jit
def load_row(ptr, offs, mask):
    return tl.load(ptr + offs + 1, mask=mask, other=0.0)


@triton.jit
def swiglu_doubled("""


def test_both_frames_are_named_where_a_helper_fails(tmp_path: Path) -> None:
    called = "load_row(gate_up_ptr + row * stride_gate_up_t + width, offs, mask)"
    changes = [("\n@triton.jit\ndef swiglu_doubled(", HELPER), (UP, f"up = {called}.to(tl.float32)")]
    file = tmp_path / "swiglu" / "doubled.py"
    _, *places = fail(tmp_path, changes).reason.split("\n  ")
    inner = "tl.load(ptr + offs + 1, mask=mask, other=0.0)"
    assert places[0] == f"at {file}:{line_of(file, inner)} in load_row: {inner}"
    assert places[1] == f"called from {file}:{line_of(file, called)} in swiglu_doubled: {called}"
