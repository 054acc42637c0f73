"""One program norms and rotates a tile of one token's heads in place; queries and keys share the launch.

Wins everywhere so far: each head is read and written once, both members of a rotated pair are in one thread, and the
angles are read once for all heads of a tile.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.rotary_heads import rotary_arguments

CONFIGS = tuple(
    Config(BLOCK_HEADS=heads, num_warps=warps) for heads, warps in ((1, 1), (2, 1), (8, 4), (16, 4), (16, 8), (32, 8))
)


@triton.jit
def qk_norm_rope_head_tile_load(
    row_ptrs, mask_rows, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """The rotated pairs of some rows as two fp32 tensors [ROWS, BLOCK_HALF]; 0 past the end. row_ptrs: [ROWS, 1]."""
    if INTERLEAVED:
        # Neighbours are loaded side by side and split in registers: two loads of stride 2 would halve their width.
        offs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        pairs = tl.load(row_ptrs + offs, mask=mask_rows & (offs < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(pairs, (ROWS, BLOCK_HALF, 2)))
    else:
        offs = tl.arange(0, BLOCK_HALF)[None, :]
        first = tl.load(row_ptrs + offs, mask=mask_rows & (offs < HALF), other=0.0)
        second = tl.load(row_ptrs + HALF + offs, mask=mask_rows & (offs < HALF), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def qk_norm_rope_head_tile_rotate(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    stride_h,
    heads,
    first_head,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads first_head and on of one token. cos_ptr and sin_ptr point at the row of the token's position."""
    offs_h = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    mask_h = offs_h < heads
    row_ptrs = x_ptr + offs_h.to(tl.int64) * stride_h  # [BLOCK_HEADS, 1]; a head-major stride can pass 2**31
    first, second = qk_norm_rope_head_tile_load(row_ptrs, mask_h, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)  # [BLOCK_HEADS, 1]
        row = tl.arange(0, 1)[:, None]
        first_weight, second_weight = qk_norm_rope_head_tile_load(
            weight_ptr + row, row == 0, HALF, INTERLEAVED, 1, BLOCK_HALF
        )  # [1, BLOCK_HALF]
        if HEAD_DIM != 2 * HALF:  # dims past R count in the norm, and are normalized but not rotated
            offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
            mask_rest = mask_h & (offs_rest < HEAD_DIM)
            rest = tl.load(row_ptrs + offs_rest, mask=mask_rest, other=0.0).to(tl.float32)
            rest_weight = tl.load(weight_ptr + offs_rest, mask=offs_rest < HEAD_DIM).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
            scale = tl.rsqrt(squares / HEAD_DIM + eps)
            rest = (rest * scale * rest_weight).to(x_ptr.dtype.element_ty)
            tl.store(row_ptrs + offs_rest, rest, mask=mask_rest)
        else:
            scale = tl.rsqrt(squares / HEAD_DIM + eps)
        first = first * scale * first_weight
        second = second * scale * second_weight
    offs = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + offs, mask=offs < HALF)  # [1, BLOCK_HALF]
    sin = tl.load(sin_ptr + offs, mask=offs < HALF)
    # One rounding, after both the norm and the rotation.
    rotated_first = (first * cos - second * sin).to(x_ptr.dtype.element_ty)
    rotated_second = (second * cos + first * sin).to(x_ptr.dtype.element_ty)
    if INTERLEAVED:
        offs_pairs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        pairs = tl.interleave(rotated_first, rotated_second)  # [BLOCK_HEADS, 2 BLOCK_HALF]
        tl.store(row_ptrs + offs_pairs, pairs, mask=mask_h & (offs_pairs < 2 * HALF))
    else:
        tl.store(row_ptrs + HALF + offs, rotated_second, mask=mask_h & (offs < HALF))
        tl.store(row_ptrs + offs, rotated_first, mask=mask_h & (offs < HALF))


@triton.jit
def qk_norm_rope_head_tile(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_weight_ptr,
    k_weight_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_cos_l,
    stride_sin_l,
    q_heads,
    kv_heads,
    q_tiles,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31
    tile = tl.program_id(1)
    position = tl.load(positions_ptr + token)  # int64, and so are the offsets made of it
    cos_ptr += position * stride_cos_l
    sin_ptr += position * stride_sin_l
    if tile < q_tiles:
        qk_norm_rope_head_tile_rotate(
            q_ptr + token * stride_q_t,
            q_weight_ptr,
            cos_ptr,
            sin_ptr,
            stride_q_h,
            q_heads,
            tile * BLOCK_HEADS,
            eps,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        qk_norm_rope_head_tile_rotate(
            k_ptr + token * stride_k_t,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            stride_k_h,
            kv_heads,
            (tile - q_tiles) * BLOCK_HEADS,
            eps,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
        )


def launch(
    run: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
) -> None:
    grid, arguments = rotary_arguments(
        q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, run.config["BLOCK_HEADS"]
    )
    run.launch(qk_norm_rope_head_tile, grid, **arguments)


VARIANT = Variant(
    wins="everywhere: each head is read and written once, in one launch for queries and keys",
    launch=launch,
    configs=CONFIGS,
    # 16 heads of 128 over 4 warps: 16-byte accesses to each half of a head, and angles and weights arrive in the heads'
    # own layout (8 heads: 8 bytes; 8 over 2 warps: the angles go through shared memory; seen in the machine code). One
    # token of Qwen3-4B is 3 programs. gfx942 has 64 threads in a warp. Interpreted, 5 and 7 heads are two tiles.
    default={
        "": Config(BLOCK_HEADS=16),
        "gfx942": Config(BLOCK_HEADS=16, num_warps=2),
        "interpreter": Config(BLOCK_HEADS=4),
    },
    key=("Hq", "Hkv", "D", "R"),
    deterministic=True,
    batch_invariant=True,
)
