"""tensor_descriptor with wide tiles, whose tiles and depth are walked by one loop: copies never wait for a tile's end.

Where the walk over tiles and the one over K are two loops, every tile ends with matrix units that wait, first for its
result to be stored and then for the next tile's first operands. As one loop the copies for the next tile are on their
way while this one is stored. Wins with hundreds of tokens and more, where the matrix units are what counts: a tile of
128 x 256 reads a quarter fewer bytes for each product than one of 128 x 128.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.ops.matmul.persistent import matmul_persistent_tile
from tkernels.ops.matmul.tensor_descriptor import supports
from tkernels.ops.products import order_of_tile, persistent_grid, tile_configs, tile_sizes

CONFIGS = tile_configs(
    (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (256, 128, 64, 8, 4),
    ),
    GROUP_M=8,
)

_SPECIALIZED = ("sm_100",)
"""Architectures whose warps are told apart: of 12 warps 8 store, the others copy and multiply, in 168 registers without
a spill (Triton 3.6.0 and 3.7.1). For sm_90 the same text compiles to what it is without (8 warps: 210 registers, none
given away by setmaxnreg; 4 warps: 2256 bytes of spills). As two loops of 4 warps 3.7.1 ends there with
"'ttng.async_tma_copy_global_to_local' op descriptor block and tensor must have the same number of elements, but got
descriptor block with 8192 elements tensor with 4096 elements" (NVGPUWarpSpecialization); 3.6.0 has no such check and
compiles copies of half a box into 168 registers, which nobody has seen run."""


@triton.jit(do_not_specialize=["tokens"])
def matmul_overlapped(
    out_ptr,
    x_boxes,
    weight_boxes,
    bias_ptr,
    stride_out_m,
    tokens,
    outputs,
    inputs,
    SPECIALIZED: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """SPECIALIZED: some warps copy, some multiply, some store."""
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(
        tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZED
    ):
        tile_m, tile_n = matmul_persistent_tile(tile, tiles_m, tiles_n, GROUP_M)
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, inputs, BLOCK_K):
            x = x_boxes.load([tile_m * BLOCK_M, start])  # [BLOCK_M, BLOCK_K]
            weight = weight_boxes.load([tile_n * BLOCK_N, start])  # [BLOCK_N, BLOCK_K]
            sums = dot(x, tl.trans(weight), sums)
        offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # M * stride can pass 2**31
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + offs_n, mask=offs_n < outputs).to(tl.float32)[None, :]
        out_ptrs = out_ptr + offs_m[:, None] * stride_out_m + offs_n[None, :]
        mask = (offs_m < tokens)[:, None] & (offs_n < outputs)[None, :]
        tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    if tokens == 0:
        return  # a descriptor has no empty shapes
    block_m, block_n, block_k = tile_sizes(run.config)
    run.launch(
        matmul_overlapped,
        persistent_grid(run, tokens, outputs, block_m, block_n),
        **pointers("out[m] bias", out, bias),
        x_boxes=TensorDescriptor.from_tensor(x, [block_m, block_k]),
        weight_boxes=TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        SPECIALIZED=run.device.arch in _SPECIALIZED,
        **run.config,
    )


VARIANT = Variant(
    wins="hundreds of tokens and more on sm_90 and newer, rows of 16-byte multiples",
    launch=launch,
    supports=supports,
    region={"M": (512, 2**31 - 1)},
    configs=CONFIGS,
    limits={"BLOCK_M": (16, 256), "BLOCK_N": (16, 256), "BLOCK_K": (16, 256)},  # a box has at most 256 along a dim
    # By reasoning, not measured. A tile's sums take 128 registers of 256 threads; four tiles of both operands and what
    # is stored take 224 of the 227 kB that a block may have on sm_90. sm_120 has 99 kB and no asynchronous products:
    # with 8 warps Triton 3.6 spills 76 bytes there, with 4 nothing.
    default={
        "": Config(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=2),
        "sm_90": Config(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
        "sm_100": Config(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("M", "N", "K"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
