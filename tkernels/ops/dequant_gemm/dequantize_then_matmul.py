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
from tkernels.ops.dequant_gemm.argument import only_plain
from tkernels.ops.dequant_gemm.unpack import magic_of, unpacked, weight_arguments, weight_tile
from tkernels.ops.dequant_gemm.weight import QuantizedWeight, interleaved

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_K=depth, num_warps=warps, num_stages=1)
    for columns, depth, warps in ((32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 4), (64, 128, 8), (128, 128, 8))
)


@triton.jit
def dequant_gemm_dequantize_then_matmul(
    dense_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    stride_dense_k,
    stride_packed_w,
    stride_scales_g,
    stride_zeros_g,
    outputs,
    inputs,
    magic,
    GROUP_WORDS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of the dense weight [K, N], in its own dtype."""
    start = tl.program_id(0) * BLOCK_K
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < outputs
    packed, zero, scale = weight_tile(
        packed_ptr, scales_ptr, zeros_ptr, stride_packed_w, stride_scales_g, stride_zeros_g,
        start // 8, inputs // 8, offs_n, mask_n, GROUP_WORDS, ONE_GROUP, BLOCK_K // 8,
    )  # fmt: skip
    weight = tl.trans(unpacked(packed, zero, scale, magic, dense_ptr.dtype.element_ty, BLOCK_N, BLOCK_K))
    offs_k = start + tl.arange(0, BLOCK_K)
    dense_ptrs = dense_ptr + offs_k.to(tl.int64)[:, None] * stride_dense_k + offs_n[None, :]  # K * N can pass 2**31
    tl.store(dense_ptrs, weight, mask=(offs_k < inputs)[:, None] & mask_n[None, :])


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return {"dense": Buffer((int(axes["K"]), int(axes["N"])), dtype_of(axes["weight"]))}


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return only_plain(axes)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    outputs, inputs = weight.shape
    dense = run.workspace["dense"]
    block_n, block_k = run.config["BLOCK_N"], run.config["BLOCK_K"]
    run.launch(
        dequant_gemm_dequantize_then_matmul,
        # No program where there is no token.
        (triton.cdiv(inputs, block_k) * min(x.shape[0], 1), triton.cdiv(outputs, block_n)),
        dense_ptr=dense,
        stride_dense_k=dense.stride(0),
        outputs=outputs,
        inputs=inputs,
        magic=magic_of(weight.dtype),
        **weight_arguments(weight, block_k // 8),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    if bias is None:
        torch.mm(x, dense, out=out)
    else:
        torch.addmm(bias, x, dense, out=out)


VARIANT = Variant(
    wins="from many hundreds of tokens on: unpacked once, whatever the rows, and multiplied by cuBLAS",
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
    key=("N", "K", "group_size"),
    deterministic=True,
    batch_invariant=False,  # cuBLAS picks its kernel by the number of tokens
)
