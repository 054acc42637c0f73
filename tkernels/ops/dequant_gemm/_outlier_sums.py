"""What a weight's outliers add to a tile of the output, in an order that is the same on every run and in every batch.

A tile's outliers, those of neighbouring outputs, lie side by side in memory. They are taken in that order, a block at a
time, as one more tile of the weight: a row for each outlier, which is 0 but at its own output, times the inputs that
they stand for. So a full row of outliers costs as much as any others of their number, and nothing is added by atomics.
"""

from typing import Any

import triton
import triton.language as tl

from tkernels.language import dot
from tkernels.quantized.weight import QuantizedWeight

OUTLIERS_AT_A_TIME = tl.constexpr(64)


def outliers_arguments(weight: QuantizedWeight) -> dict[str, Any]:
    """What the functions here read, as kernels take it."""
    sparse = weight.outliers
    return {
        "rows_ptr": None if sparse is None else sparse.rows,
        "cols_ptr": None if sparse is None else sparse.cols,
        "vals_ptr": None if sparse is None else sparse.vals,
    }


@triton.jit
def outlier_rows(rows_ptr, offs_n, mask_n):
    """Where each output's outliers begin and end, [BLOCK_N] each, and where those of all of them do."""
    starts = tl.load(rows_ptr + offs_n, mask=mask_n, other=2**31 - 1)
    ends = tl.load(rows_ptr + offs_n + 1, mask=mask_n, other=0)
    return starts, ends, tl.min(starts, axis=0), tl.max(ends, axis=0)


@triton.jit
def outlier_block(cols_ptr, vals_ptr, starts, ends, first, last, BLOCK_S: tl.constexpr):
    """Outliers first .. first + BLOCK_S, those before `last`: inputs and values [BLOCK_S], whether they are there, and
    whose they are, [BLOCK_S, BLOCK_N].
    """
    offs = first + tl.arange(0, BLOCK_S)  # below 2**31: Outliers refuses 2**30
    mask = offs < last
    cols = tl.load(cols_ptr + offs, mask=mask, other=0)
    vals = tl.load(vals_ptr + offs, mask=mask, other=0.0)
    owned = (offs[:, None] >= starts[None, :]) & (offs[:, None] < ends[None, :])
    return cols, vals, mask, owned


@triton.jit
def outlier_sums(
    sums,
    x_ptrs,
    mask_m,
    rows_ptr,
    cols_ptr,
    vals_ptr,
    offs_n,
    mask_n,
    part,
    parts,
    BLOCK_S: tl.constexpr,
):
    """sums [BLOCK_M, BLOCK_N] plus the products of every `parts`-th block of outliers, from block `part` on.

    x_ptrs: [BLOCK_M, 1], each row's input 0.
    """
    starts, ends, first, last = outlier_rows(rows_ptr, offs_n, mask_n)
    for at in tl.range(first + part * BLOCK_S, last, parts * BLOCK_S, num_stages=1):
        cols, vals, mask, owned = outlier_block(cols_ptr, vals_ptr, starts, ends, at, last, BLOCK_S)
        x = tl.load(x_ptrs + cols[None, :], mask=mask_m[:, None] & mask[None, :], other=0.0)  # [BLOCK_M, BLOCK_S]
        weight = tl.where(owned, vals[:, None], tl.zeros((1, 1), dtype=vals.dtype))  # [BLOCK_S, BLOCK_N]
        sums = dot(x, weight, sums)
    return sums


@triton.jit
def outlier_sums_of_one(sums, x_ptr, rows_ptr, cols_ptr, vals_ptr, offs_n, mask_n, part, parts, BLOCK_S: tl.constexpr):
    """As `outlier_sums` for one token: sums [BLOCK_N], x_ptr its input 0."""
    starts, ends, first, last = outlier_rows(rows_ptr, offs_n, mask_n)
    for at in tl.range(first + part * BLOCK_S, last, parts * BLOCK_S, num_stages=1):
        cols, vals, _, owned = outlier_block(cols_ptr, vals_ptr, starts, ends, at, last, BLOCK_S)
        products = tl.load(x_ptr + cols).to(tl.float32) * vals  # [BLOCK_S]; past the end input 0, which nobody owns
        sums += tl.sum(tl.where(owned, products[:, None], 0.0), axis=0)
    return sums
