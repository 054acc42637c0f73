"""persistent with its operands copied by tensor descriptors (TMA): one thread asks for a tile, no lane has addresses.

What a tile has beyond the matrices comes as zeros, so its loop has no masks at all. Wins on sm_90 and newer wherever
persistent does, with the registers and instructions that addresses and masks take there.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tkernels import Axes, Config, DeviceFacts, Run, Variant
from tkernels.device import is_from_sm_90
from tkernels.language import dot
from tkernels.ops.arguments import pointers
from tkernels.ops.matmul.persistent import matmul_persistent_tile
from tkernels.ops.products import order_of_tile, persistent_grid, tile_configs, tile_sizes

CONFIGS = tile_configs(
    (
        (64, 64, 64, 4, 4),
        (64, 64, 128, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 128, 128, 4, 3),
        (64, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 3),
    ),
    GROUP_M=8,
)


@triton.jit(do_not_specialize=["tokens"])
def matmul_tensor_descriptor(
    out_ptr,
    x_boxes,
    weight_boxes,
    bias_ptr,
    stride_out_m,
    tokens,
    outputs,
    inputs,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
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
        matmul_tensor_descriptor,
        persistent_grid(run, tokens, outputs, block_m, block_n),
        **pointers("out[m] bias", out, bias),
        x_boxes=TensorDescriptor.from_tensor(x, [block_m, block_k]),
        weight_boxes=TensorDescriptor.from_tensor(weight, [block_n, block_k]),
        tokens=tokens,
        outputs=outputs,
        inputs=inputs,
        **run.config,
    )


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if device.arch != "interpreter":
        if not is_from_sm_90(device.arch):
            return f"tensor descriptors are copied by hardware from sm_90 on; this is {device.arch}"
        if axes.get("activation") == "float32":
            # Compiled with 64 x 64 tiles for sm_90: 4936 bytes of stack, where persistent has none.
            return "fp32 products run on FMA units from registers, which swizzled tiles fill by spilling"
    for name in ("x", "weight"):
        if not axes.get(f"{name}_aligned", True):
            return f"a tensor descriptor needs {name}'s address and row stride to be multiples of 16 bytes"
    return None


VARIANT = Variant(
    wins="many tiles of output on sm_90 and newer, rows of 16-byte multiples",
    launch=launch,
    supports=supports,
    configs=CONFIGS,
    limits={"BLOCK_M": (16, 256), "BLOCK_N": (16, 256), "BLOCK_K": (16, 256)},  # a box has at most 256 along a dim
    default={
        "": Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=3),
        "sm_90": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=4),
        "sm_100": Config(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=4),
        "interpreter": Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, GROUP_M=2, num_warps=4, num_stages=2),
    },
    key=("M", "N", "K"),
    sum_order=order_of_tile,
    deterministic=True,
    batch_invariant=True,
)
