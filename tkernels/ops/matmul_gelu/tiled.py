"""One program multiplies one tile of the output, and adds the bias and takes the gelu of the fp32 sums before it
writes them.

Wins wherever the projection is its own: the sums never go to memory and back, which saves 2TI elements of traffic, a
launch and a rounding.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import dot
from tkernels.ops.activations import gelu_of
from tkernels.ops.arguments import pointers
from tkernels.ops.products import order_of_tile, tile_configs, tile_grid

CONFIGS = tile_configs(
    (
        (16, 64, 128, 4, 4),
        (16, 128, 128, 4, 4),
        (32, 64, 128, 4, 4),
        (64, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
    )
)


@triton.jit(do_not_specialize=["tokens"])
def matmul_gelu_tiled(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    stride_out_t,
    stride_x_t,
    stride_weight_i,
    tokens,
    width,
    inputs,
    TANH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # T * stride and I * stride can pass 2**31.
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < tokens, offs_n < width
    x_ptrs = x_ptr + offs_m[:, None] * stride_x_t
    weight_ptrs = weight_ptr + offs_n[:, None] * stride_weight_i
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = (offs_k < inputs)[None, :]
        x = tl.load(x_ptrs + offs_k[None, :], mask=mask_m[:, None] & mask_k, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = tl.load(weight_ptrs + offs_k[None, :], mask=mask_n[:, None] & mask_k, other=0.0)
        sums = dot(x, tl.trans(weight), sums)  # [BLOCK_M, BLOCK_K] @ [BLOCK_K, BLOCK_N]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + offs_n, mask=mask_n).to(tl.float32)[None, :]
    out = gelu_of(sums, TANH).to(out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + offs_m[:, None] * stride_out_t + offs_n[None, :]
    tl.store(out_ptrs, out, mask=mask_m[:, None] & mask_n[None, :])


def launch(
    run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tanh: bool
) -> None:
    (tokens, inputs), width = x.shape, weight.shape[0]
    block_m, block_n = run.config["BLOCK_M"], run.config["BLOCK_N"]
    if x.element_size() == 4:
        block_n = min(block_n, 64)  # fp32 products run on FMA units, from registers, as matmul.persistent's do
    run.launch(
        matmul_gelu_tiled,
        tile_grid(tokens, width, block_m, block_n),
        **pointers("out[t] x[t] weight[i] bias", out, x, weight, bias),
        tokens=tokens,
        width=width,
        inputs=inputs,
        TANH=tanh,
        **{**run.config, "BLOCK_N": block_n},
    )


VARIANT = Variant(
    wins="many tiles of output: prefill, where what gelu reads would go to memory and back",
    launch=launch,
    configs=CONFIGS,
    # As matmul.persistent's, whose loop it has. One config for every T, or a row's bits would depend on the batch.
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, num_warps=4, num_stages=2),
    },
    key=("T", "I", "H"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
