"""What the fused variants share: their workspace, their tables, and the first product's end."""

import triton
import triton.language as tl

from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.inputs import dtype_of
from tkernels.ops.activations import swiglu_of
from tkernels.ops.grouped_matmul._argument import needs_codes, needs_dense, needs_e4m3
from tkernels.ops.grouped_matmul._tiles import products_buffers
from tkernels.ops.sort_by_expert._tables import table_buffers
from tkernels.workspace import Buffer


def fused_buffers(axes: Axes, tile: int | None, device: DeviceFacts, combine: bool = True) -> dict[str, Buffer]:
    """The tables of a sort into such tiles, the activations of all pairs, and their products."""
    pairs = int(axes["T"]) * int(axes["K"])
    return {
        **({} if tile is None else table_buffers(axes, tile, device)),
        "activated": Buffer((pairs, int(axes["I"])), dtype_of(axes["activation"])),
        **products_buffers(pairs, int(axes["H"]), combine),
    }


def supports_dense(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a variant for dense weights does not take these, or None where it does."""
    return needs_dense(axes)


def supports_codes(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a variant for codes does not take these, or None where it does."""
    return needs_codes(axes)


def supports_e4m3(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a variant for e4m3 codes does not take these, or None where it does."""
    return needs_e4m3(axes)


@triton.jit
def activated(gate, up, bias_ptr, stride_bias_e, expert, offs_n, mask_n, width, limit, CLAMPED: tl.constexpr):
    """fp32 [..., BLOCK_N] twice -> swiglu of both and their biases."""
    if bias_ptr is not None:
        bias_ptr += expert.to(tl.int64) * stride_bias_e
        gate += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        up += tl.load(bias_ptr + width + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return swiglu_of(gate, up, limit, CLAMPED)
