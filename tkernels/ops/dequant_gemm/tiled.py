"""Tiles of the output on the matrix units: each tile of codes is unpacked in registers on its way to shared memory.

Wins from a handful of tokens on: the codes are read once for BLOCK_M tokens, and the loads of the next tiles are in
flight while this one is multiplied. It takes every weight: codes of all widths, lookups, outliers, and permutations,
for which one launch more brings the inputs into the codes' order.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.inputs import dtype_of
from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.ops.dequant_gemm._outlier_sums import OUTLIERS_AT_A_TIME, outlier_sums, outliers_arguments
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
from tkernels.ops.products import order_of_tile, tile_configs, tile_grid, tile_sizes
from tkernels.quantized.codes import codes_per_word
from tkernels.quantized.weight import QuantizedWeight, interleaved

GATHERED_AT_A_TIME = 1024
"""Places of a row for one program, where a permutation makes it gather them."""

CONFIGS = tile_configs(
    (
        (16, 32, 128, 4, 4),
        (16, 64, 64, 4, 4),
        (16, 64, 128, 4, 4),
        (16, 128, 64, 8, 4),
        (32, 64, 128, 4, 4),
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 64, 128, 4, 4),
        (64, 128, 128, 8, 3),
        (64, 256, 64, 8, 3),
        (64, 128, 64, 8, 3),
        (64, 128, 64, 8, 4),
        (128, 64, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 128, 8, 3),
    )
)


@triton.jit(do_not_specialize=["tokens"])
def dequant_gemm_tiled(
    out_ptr,
    x_ptr,
    inputs_ptr,
    packed_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    rows_ptr,
    cols_ptr,
    vals_ptr,
    bias_ptr,
    stride_out_m,
    stride_x_m,
    stride_inputs_m,
    stride_packed_w,
    stride_high_w,
    stride_scales_g,
    stride_zeros_g,
    stride_table_c,
    tokens,
    outputs,
    places,
    magic,
    BITS: tl.constexpr,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x has the inputs by place, `inputs` as they came. A word row is a row of `packed`."""
    FIELDS: tl.constexpr = 16 if BITS == 3 else 32 // BITS
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # M * stride can pass 2**31
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < tokens, offs_n < outputs
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_m
    table = table_tile(table_ptr, stride_table_c, offs_n, mask_n, BITS)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, places, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < places
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        first, end = start // FIELDS, places // FIELDS
        packed, high = word_tile(
            packed_ptr, high_ptr, stride_packed_w, stride_high_w, first, end, offs_n, mask_n, BLOCK_K // FIELDS
        )
        if table_ptr is None:
            zero, scale = group_tile(
                scales_ptr, zeros_ptr, stride_scales_g, stride_zeros_g, first, end, offs_n, mask_n,
                BITS, GROUP_WORDS, ONE_GROUP, BLOCK_K // FIELDS,
            )  # fmt: skip
            weight = unpacked(packed, high, zero, scale, magic, x_ptr.dtype.element_ty, BITS, BLOCK_N, BLOCK_K)
        else:
            weight = looked_up(packed, high, table, table_ptr, stride_table_c, offs_n, mask_n, BITS, BLOCK_N, BLOCK_K)
        sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    if rows_ptr is not None:
        inputs_ptrs = inputs_ptr + offs_m[:, None] * stride_inputs_m
        sums = outlier_sums(
            sums, inputs_ptrs, mask_m, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, 0, 1, OUTLIERS_AT_A_TIME
        )
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit
def dequant_gemm_tiled_by_place(
    by_place_ptr, x_ptr, permutation_ptr, stride_by_place_m, stride_x_m, places, BLOCK_K: tl.constexpr
):
    """Row m of x [M, K] as the weight has its codes, [M, Kp]: with 0 where a place is padding."""
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    cols, is_input = inputs_at(permutation_ptr, offs_k, places)
    x = tl.load(x_ptr + row * stride_x_m + cols, mask=is_input, other=0.0)
    tl.store(by_place_ptr + row * stride_by_place_m + offs_k, x, mask=offs_k < places)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    if not axes.get("permuted", False):
        return {}
    return {"by_place": Buffer((int(axes["M"]), int(axes["K"]) + int(axes["padding"])), dtype_of(axes["activation"]))}


def inputs_by_place(run: Run, x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x [M, K] as the weight has its codes, [M, Kp]: gathered once, not by the programs of every tile of outputs, which
    then read whole lines.
    """
    if weight.permutation is None:
        return x
    by_place = run.workspace["by_place"]
    run.launch(
        dequant_gemm_tiled_by_place,
        (x.shape[0], triton.cdiv(weight.places, GATHERED_AT_A_TIME)),
        **pointers("by_place[m] x[m] permutation", by_place, x, weight.permutation),
        places=weight.places,
        BLOCK_K=GATHERED_AT_A_TIME,
    )
    return by_place


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, _ = weight.shape
    block_m, block_n, block_k = tile_sizes(run.config)
    if x.dtype == torch.float32:
        # It has no matrix unit that multiplies it exactly: a larger product, unrolled in registers, spills (1.6 kB for
        # 64 x 64 x 64 on sm_80 to sm_90).
        block_m, block_n, block_k = min(block_m, 32), min(block_n, 64), min(block_k, 32)
    by_place = inputs_by_place(run, x, weight)
    run.launch(
        dequant_gemm_tiled,
        tile_grid(x.shape[0], outputs, block_m, block_n),
        **pointers("out[m] x[m] inputs[m] bias", out, by_place, x, bias),
        **words_arguments(weight),
        **groups_arguments(weight, block_k // codes_per_word(weight.bits)),
        **table_arguments(weight),
        **outliers_arguments(weight),
        tokens=x.shape[0],
        outputs=outputs,
        places=weight.places,
        magic=magic_of(weight.dtype),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )


VARIANT = Variant(
    wins="from a handful of tokens on: a tile of codes is read and unpacked once for all tokens of its rows",
    launch=launch,
    configs=CONFIGS,
    # 64 rows are the least that Hopper's asynchronous matrix units take. There, a tile of 64 outputs, so that 64 tokens
    # at N = 8192 are 128 programs, and one group of 128 deep: 5.3 instructions for each weight, 7.2 at half the depth.
    # BLOCK_K 64 divides the usual groups of 64 and 128. One default for every M, or a row's bits would depend on the
    # batch. gfx942 has 64 kB of shared memory: two stages. On sm_120 4 warps spill where codes have 2 bits or a table.
    # Interpreted, tiles are the smallest legal ones, so that shapes of the tests cross them.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4),
        "sm_120": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=8, num_stages=3),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    supports=needs_interleaved,
    workspace=workspace,
    prepare=interleaved,
    key=("M", "N", "K", "bits", "coding", "permuted", "sparse", "group_size"),
    # The columns too: a tile takes its outliers as they follow each other, whichever of its columns they are for.
    sum_order=lambda config: (order_of_tile(config), config["BLOCK_N"]),
    deterministic=True,
    batch_invariant=True,
)
