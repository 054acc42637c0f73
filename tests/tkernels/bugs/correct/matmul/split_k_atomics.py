"""K is split over programs, which add their sums to a workspace of fp32 with atomics: cleared before, rounded after."""

import torch
import triton
import triton.language as tl

from tkernels import Buffer, Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers


@triton.jit
def matmul_split_k_atomics_clear(sums_ptr, elements, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums_ptr + offs, tl.zeros((BLOCK,), tl.float32), mask=offs < elements)


@triton.jit
def matmul_split_k_atomics(
    sums_ptr, x_ptr, weight_ptr, stride_sums_m, stride_x_m, stride_weight_n, rows, columns, depth,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < rows, offs_n < columns
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(split * BLOCK_K, depth, SPLITS * BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < depth
        x_ptrs = x_ptr + offs_m[:, None] * stride_x_m + offs_k[None, :]
        weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_n + offs_k[None, :]
        x = tl.load(x_ptrs, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        weight = tl.load(weight_ptrs, mask=mask_n[:, None] & mask_k[None, :], other=0.0)
        sums = dot(x, tl.trans(weight), sums)
    mask = mask_m[:, None] & mask_n[None, :]
    tl.atomic_add(sums_ptr + offs_m[:, None] * stride_sums_m + offs_n[None, :], sums, mask=mask, sem="relaxed")


@triton.jit
def matmul_split_k_atomics_round(
    out_ptr, sums_ptr, bias_ptr, stride_out_m, stride_sums_m, columns, BLOCK_N: tl.constexpr
):  # fmt: skip
    row, offs_n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    mask = offs_n < columns
    sums = tl.load(sums_ptr + row * stride_sums_m + offs_n, mask=mask)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * stride_out_m + offs_n, sums.to(out_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, out, x, weight, bias) -> None:
    (rows, depth), columns, sums = x.shape, weight.shape[0], run.workspace["sums"]
    block_m, block_n, splits = 16, 32, run.config["SPLITS"]
    run.launch(
        matmul_split_k_atomics_clear, (triton.cdiv(rows * columns, 1024),), sums_ptr=sums, elements=rows * columns,
        BLOCK=1024,
    )  # fmt: skip
    run.launch(
        matmul_split_k_atomics, (triton.cdiv(rows, block_m), triton.cdiv(columns, block_n), splits),
        **pointers("sums[m] x[m] weight[n]", sums, x, weight), rows=rows, columns=columns, depth=depth, SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=16,
    )  # fmt: skip
    run.launch(
        matmul_split_k_atomics_round, (rows,), **pointers("out[m] sums[m] bias", out, sums, bias), columns=columns,
        BLOCK_N=triton.next_power_of_2(columns),
    )  # fmt: skip


VARIANT = Variant(
    wins="never: it is as short as can be",
    launch=launch,
    default={"": Config(SPLITS=2)},
    workspace=lambda axes, config, device: {"sums": Buffer((axes["M"], axes["N"]), torch.float32)},
    deterministic=False,
    batch_invariant=False,
)
