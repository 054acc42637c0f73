"""The dense weight is written to a workspace once, and torch's own matmul (cuBLAS) multiplies by it.

Wins at many hundreds of tokens, where the product is bound by the matrix units: the two extra passes over a dense
weight cost as much as 5/4 of its bytes, however many tokens there are, and a tile that unpacks as it goes pays for
unpacking once for every tile of rows.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.inputs import dtype_of
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.ops.dequant_gemm._outlier_sums import (
    OUTLIERS_AT_A_TIME,
    outlier_block,
    outlier_rows,
    outliers_arguments,
)
from tkernels.ops.dequant_gemm._unpack import (
    group_tile,
    groups_arguments,
    inputs_at,
    looked_up,
    magic_of,
    table_arguments,
    table_tile,
    unpacked,
    word_tile,
    words_arguments,
)
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.weight import QuantizedWeight, interleaved

OUTLIER_PROGRAMS = 4
"""That share the outliers of a tile of outputs: a full row of them is then a few dozen blocks for each."""

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=1)
    for columns, depth, warps in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (64, 128, 8), (128, 128, 8))
)


@triton.jit
def dequant_gemm_dequantize_then_matmul(
    dense_ptr,
    packed_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    permutation_ptr,
    stride_dense_k,
    stride_packed_w,
    stride_high_w,
    stride_scales_g,
    stride_zeros_g,
    stride_table_c,
    outputs,
    places,
    magic,
    BITS: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the codes, as rows of the dense weight [K, N] in its own dtype."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    start = tl.program_id(0) * BLOCK_K
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    first, end = start // FIELDS, places // FIELDS
    packed, high = word_tile(
        packed_ptr, high_ptr, stride_packed_w, stride_high_w, first, end, offs_n, mask_n, BLOCK_K // FIELDS
    )
    if table_ptr is None:
        zero, scale = group_tile(
            scales_ptr, zeros_ptr, stride_scales_g, stride_zeros_g, first, end, offs_n, mask_n,
            BITS, GROUP_WORDS, ONE_GROUP, BLOCK_K // FIELDS,
        )  # fmt: skip
        weight = unpacked(packed, high, zero, scale, magic, dense_ptr.dtype.element_ty, BITS, BLOCK_N, BLOCK_K)
    else:
        table = table_tile(table_ptr, stride_table_c, offs_n, mask_n, BITS)
        weight = looked_up(packed, high, table, table_ptr, stride_table_c, offs_n, mask_n, BITS, BLOCK_N, BLOCK_K)
    rows, mask_k = inputs_at(permutation_ptr, start + tl.arange(0, BLOCK_K), places)
    dense_ptrs = dense_ptr + rows.to(tl.int64)[:, None] * stride_dense_k + offs_n[None, :]  # K * N can pass 2**31
    tl.store(dense_ptrs, tl.trans(weight), mask=mask_k[:, None] & mask_n[None, :])


@triton.jit
def dequant_gemm_dequantize_then_matmul_outliers(
    dense_ptr,
    rows_ptr,
    cols_ptr,
    vals_ptr,
    stride_dense_k,
    outputs,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Adds a share of the outliers of BLOCK_N outputs to the dense weight."""
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    starts, ends, first, last = outlier_rows(rows_ptr, offs_n, offs_n < outputs)
    for at in tl.range(first + tl.program_id(0) * BLOCK_S, last, tl.num_programs(0) * BLOCK_S, num_stages=1):
        cols, vals, mask, owned = outlier_block(cols_ptr, vals_ptr, starts, ends, at, last, BLOCK_S)
        output = tl.sum(tl.where(owned, offs_n[None, :], 0), axis=1)  # [BLOCK_S]: each has one owner
        dense_ptrs = dense_ptr + cols.to(tl.int64) * stride_dense_k + output
        # No other program has this weight: an output has one outlier at most for each input.
        value = tl.load(dense_ptrs, mask=mask).to(tl.float32) + vals
        tl.store(dense_ptrs, value.to(dense_ptr.dtype.element_ty), mask=mask)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return {"dense": Buffer((int(axes["K"]), int(axes["N"])), dtype_of(axes["weight"]))}


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if axes.get("sparse", False) and axes.get("coding", "uniform") == "uniform":
        return "it adds outliers to weights that are rounded already, which is exact of a table's entries alone"
    return needs_interleaved(axes, device)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, _ = weight.shape
    dense = run.workspace["dense"]
    block_n, block_k = run.config["BLOCK_N"], run.config["BLOCK_K"]
    some = min(x.shape[0], 1)  # no program where there is no token
    run.launch(
        dequant_gemm_dequantize_then_matmul,
        (triton.cdiv(weight.places, block_k) * some, triton.cdiv(outputs, block_n)),
        dense_ptr=dense,
        **words_arguments(weight),
        **groups_arguments(weight, block_k // codes_per_word(weight.bits)),
        **table_arguments(weight),
        permutation_ptr=weight.permutation,
        stride_dense_k=dense.stride(0),
        outputs=outputs,
        places=weight.places,
        magic=magic_of(weight.dtype),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    if weight.outliers is not None:
        run.launch(
            dequant_gemm_dequantize_then_matmul_outliers,
            (OUTLIER_PROGRAMS * some, triton.cdiv(outputs, block_n)),
            dense_ptr=dense,
            **outliers_arguments(weight),
            stride_dense_k=dense.stride(0),
            outputs=outputs,
            BLOCK_N=block_n,
            BLOCK_S=OUTLIERS_AT_A_TIME,
        )
    if bias is None:
        torch.mm(x, dense, out=out)
    else:
        torch.addmm(bias, x, dense, out=out)


VARIANT = Variant(
    wins="from many hundreds of tokens on: unpacked once, whatever the rows, and multiplied by cuBLAS",
    # By reasoning: at 8192 x 8192 on an H200 the dense weight's way to memory and back costs 250 MB, 60 us, and 512
    # tokens take cuBLAS 90; the tiles that unpack as they go run at perhaps two thirds of its rate.
    region={"M": (512, 2**31 - 1)},
    launch=launch,
    configs=CONFIGS,
    # A tile of 64 x 128 codes is 4 kB read and 16 kB written; rows of 64 outputs are 128 bytes, a whole line.
    # Interpreted, tiles are the smallest, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=1),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32, num_warps=4, num_stages=1),
    },
    supports=supports,
    workspace=workspace,
    prepare=interleaved,
    key=("N", "K", "bits", "coding", "permuted", "sparse", "group_size"),
    deterministic=True,
    batch_invariant=False,  # cuBLAS picks its kernel by the number of tokens
)
