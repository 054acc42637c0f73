"""persistent with the weights copied by tensor descriptors (TMA): one thread asks for a tile, no lane has addresses.

Rows of pairs are still gathered, which no box of a descriptor does before sm_100. Wins on sm_90 and newer where
persistent does, with the registers and instructions that the weights' addresses and masks take there.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.device import is_from_sm_90
from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.ops.grouped_matmul._argument import needs_dense
from tkernels.ops.grouped_matmul._tiles import (
    combine_products,
    pairs_of_row,
    pairs_of_tile,
    place_of_tile,
    products_of,
    products_workspace,
    store_pairs,
    tile_arguments,
    with_bias,
)
from tkernels.ops.grouped_matmul.padded_tiles import grouped_matmul_combine

CONFIGS = tuple(
    Config(BLOCK_N=columns, BLOCK_K=depth, GROUP_M=8, num_warps=warps, num_stages=stages)
    for columns, depth, warps, stages in (
        (64, 64, 4, 4),
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
        (256, 64, 8, 4),
    )
)


@triton.jit(do_not_specialize=["tiles_m", "pairs_of_row"])
def grouped_matmul_tensor_descriptor(
    out_ptr,
    x_ptr,
    weight_boxes,
    bias_ptr,
    order_ptr,
    starts_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    stride_out_m,
    stride_x_m,
    stride_bias_e,
    tiles_m,
    outputs,
    inputs,
    pairs_of_row,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_ptr + tile_m)
        if expert >= 0:
            pairs, mask_m = pairs_of_tile(order_ptr, starts_ptr, tile_start_ptr, tile_m, expert, BLOCK_M)
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            x_ptrs = x_ptr + (pairs // pairs_of_row).to(tl.int64)[:, None] * stride_x_m  # X * stride can pass 2**31
            sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start in range(0, inputs, BLOCK_K):
                offs_k = start + tl.arange(0, BLOCK_K)
                mask = mask_m[:, None] & (offs_k < inputs)[None, :]
                x = tl.load(x_ptrs + offs_k[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_K]
                weight = weight_boxes.load([expert, tile_n * BLOCK_N, start])  # [1, BLOCK_N, BLOCK_K]
                sums = dot(x, tl.trans(tl.reshape(weight, (BLOCK_N, BLOCK_K))), sums)
            sums = with_bias(sums, bias_ptr, stride_bias_e, expert, offs_n, offs_n < outputs)
            store_pairs(out_ptr, stride_out_m, sums, pairs, mask_m, offs_n, offs_n < outputs)


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    block_n, block_k = run.config["BLOCK_N"], run.config["BLOCK_K"]
    tiles_m = tile_expert.shape[0]
    run.launch(
        grouped_matmul_tensor_descriptor,
        (min(tiles_m * triton.cdiv(weight.shape[1], block_n), run.device.multiprocessors),),
        **pointers("out[m] x[m] bias", products_of(run, out, combine), x, bias),
        **tile_arguments(order, starts, tile_expert, tile_start),
        weight_boxes=TensorDescriptor.from_tensor(weight, [1, block_n, block_k]),
        stride_bias_e=0 if bias is None else bias.stride(0),
        tiles_m=tiles_m,
        outputs=weight.shape[1],
        inputs=weight.shape[2],
        pairs_of_row=pairs_of_row(x, experts),
        GROUP_M=run.config["GROUP_M"],
        BLOCK_M=tile,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
    )
    combine_products(run, grouped_matmul_combine, out, experts, combine)


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    return products_workspace(axes)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if reason := needs_dense(axes):
        return reason
    if device.arch != "interpreter":
        if not is_from_sm_90(device.arch):
            return f"tensor descriptors are copied by hardware from sm_90 on; this is {device.arch}"
        if axes.get("activation") == "float32":
            return "fp32 products run on FMA units from registers, which swizzled tiles fill by spilling"
    if not axes.get("weight_aligned", True):
        return "a tensor descriptor needs weight's address and strides to be multiples of 16 bytes"
    return None


VARIANT = Variant(
    wins="many pairs for each expert on sm_90 and newer, rows of 16-byte multiples",
    launch=launch,
    configs=CONFIGS,
    workspace=workspace,
    supports=supports,
    region={"T": (513, 2**31 - 1)},
    limits={"BLOCK_N": (16, 256), "BLOCK_K": (16, 256)},  # a box has at most 256 along a dim
    default={
        "": Config(BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
        "sm_100": Config(BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=4),
        "interpreter": Config(BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("T", "K", "E", "N", "C", "tile"),
    sum_order=lambda config: config["BLOCK_K"],
    deterministic=True,
    batch_invariant=True,
)
