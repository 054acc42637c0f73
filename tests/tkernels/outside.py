"""Variant files for tests: correct, wrong and broken ones, written into a folder as an outsider would."""

from collections.abc import Sequence
from pathlib import Path

from tkernels import OPS
from tkernels.variant import Variant
from tkernels.verification.check import drawn_results

DOUBLED = """
import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant


@triton.jit
def swiglu_doubled(
    out_ptr, gate_up_ptr, stride_gate_up_t, stride_out_t, width, FACTOR: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < width
    gate = tl.load(gate_up_ptr + row * stride_gate_up_t + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_gate_up_t + width + offs, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1 + tl.exp(-gate)) * up * FACTOR
    tl.store(out_ptr + row * stride_out_t + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, out: torch.Tensor, gate_up: torch.Tensor) -> None:
    tokens, width = out.shape
    run.launch(
        swiglu_doubled, (tokens,), out_ptr=out, gate_up_ptr=gate_up, stride_gate_up_t=gate_up.stride(0),
        stride_out_t=out.stride(0), width=width, FACTOR=1, BLOCK=triton.next_power_of_2(width),
    )


VARIANT = Variant(
    wins="never", launch=launch, default={"": Config()}, configs=(Config(), Config(num_warps=8)), key=("I",),
    deterministic=True, batch_invariant=True,
)
"""


def write_variant(folder: Path, *changes: tuple[str, str], op: str = "swiglu", name: str = "doubled") -> Path:
    """`<folder>/<op>/<name>.py` with DOUBLED's source after the replacements; returns the folder."""
    source = DOUBLED
    for before, after in changes:
        assert before in source, before
        source = source.replace(before, after)
    (folder / op).mkdir(parents=True, exist_ok=True)
    (folder / op / f"{name}.py").write_text(source)
    return folder


def write_copy(folder: Path, original: str, name: str, *changes: tuple[str, str], first: Sequence[str] = ()) -> Path:
    """`<folder>/<op>/<name>.py` with the source of a built-in variant, "op.variant", or of `swiglu.doubled`.

    changes: Replacements in it.
    first: Lines that its launcher begins with.
    """
    op, variant = original.split(".")
    source = DOUBLED if original == "swiglu.doubled" else OPS[op].variants[variant].file.read_text()
    for before, after in changes:
        assert before in source, before
        source = source.replace(before, after)
    head, launcher = source.split("def launch(")
    signature, body = launcher.split("-> None:\n", 1)
    begin = "".join(f"    {line}\n" for line in first)
    source = f"{head}def launch({signature}-> None:\n{begin}{body}"
    (folder / op).mkdir(parents=True, exist_ok=True)
    (folder / op / f"{name}.py").write_text(source.replace(f"{op}_{variant}", f"{op}_{name}"))
    return folder


def computes_wrong(variant: Variant) -> bool:
    """Whether a drawn case shows a wrong value, or an address outside of what a call has. Other errors count as none: a
    change by which a kernel no longer runs would be found by anyone.
    """
    results = drawn_results(variant, 20)
    return any(one.status == "wrong" or str(one.reason).startswith("AddressError") for one in results)
