"""Tiles of the output over a weight of 4-bit codes as checkpoints have them: each code's word is loaded for itself."""

import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers


@triton.jit
def dequant_gemm_code_by_code(
    out_ptr, x_ptr, packed_ptr, scales_ptr, zeros_ptr, inputs_ptr, bias_ptr, stride_out_m, stride_x_m, stride_packed_w,
    stride_scales_g, stride_zeros_g, rows, columns, places, group_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < rows, offs_n < columns
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, places, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < places
        inputs = offs_k
        if inputs_ptr is not None:  # the input that each place stands for, -1 for none
            inputs = tl.load(inputs_ptr + offs_k, mask=mask_k, other=-1)
        mask_x = mask_m[:, None] & (mask_k & (inputs >= 0))[None, :]
        x = tl.load(x_ptr + offs_m[:, None] * stride_x_m + inputs[None, :], mask=mask_x, other=0.0)
        mask = mask_k[:, None] & mask_n[None, :]
        words = tl.load(packed_ptr + (offs_k // 8)[:, None] * stride_packed_w + offs_n[None, :], mask=mask, other=0)
        codes = (words >> (offs_k % 8 * 4)[:, None]) & 15
        groups = (offs_k // group_size).to(tl.int64)[:, None]
        scales = tl.load(scales_ptr + groups * stride_scales_g + offs_n[None, :], mask=mask, other=0.0)
        zeros = tl.full((BLOCK_K, BLOCK_N), 8, tl.int32)
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + groups * stride_zeros_g + offs_n[None, :], mask=mask, other=0).to(tl.int32)
        weight = (codes - zeros).to(tl.float32) * scales.to(tl.float32)  # [BLOCK_K, BLOCK_N]
        sums = dot(x.to(tl.float32), weight, sums)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


def launch(run: Run, out, x, weight, bias) -> None:
    rows, columns = out.shape
    zeros = weight.zeros
    run.launch(
        dequant_gemm_code_by_code,
        (triton.cdiv(rows, 16), triton.cdiv(columns, 32)),
        **pointers("out[m] x[m] packed[w] scales[g]", out, x, weight.packed, weight.scales),
        zeros_ptr=zeros,
        stride_zeros_g=0 if zeros is None else zeros.stride(0),
        inputs_ptr=weight.permutation,
        bias_ptr=bias,
        rows=rows,
        columns=columns,
        places=weight.places,
        group_size=weight.group_size,
        BLOCK_M=16,
        BLOCK_N=32,
        BLOCK_K=32,
    )


def supports(axes, device):
    if (
        axes["bits"] != 4
        or axes["coding"] != "uniform"
        or axes["sparse"]
        or axes.get("order", "sequential") != "sequential"
    ):
        return "it takes 4-bit codes in a checkpoint's order"
    return None


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config()},
    supports=supports,
    deterministic=True,
    batch_invariant=True,
)
