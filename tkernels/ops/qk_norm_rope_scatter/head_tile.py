"""One program takes a tile of one token's heads: queries go back to where they were, keys and values to their slot.

Wins wherever all three steps are wanted: every element of the projection's row is read once and written once, rotated
keys never go to memory and back, and a layer has one launch where it had two.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import wait_for_earlier_launches
from tkernels.ops.arguments import pointers
from tkernels.ops.paged_cache import unsupported_kv
from tkernels.ops.qk_norm_rope.head_tile import qk_norm_rope_head_tile_load
from tkernels.ops.rotary_heads import rotary_arguments

CONFIGS = (
    *(
        Config(BLOCK_HEADS=heads, num_warps=warps)
        for heads, warps in ((1, 1), (2, 1), (4, 1), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8))
    ),
    Config(BLOCK_HEADS=16, num_warps=4, launch_pdl=1),
)


@triton.jit
def qk_norm_rope_scatter_head_tile_stored(values, scale, dtype: tl.constexpr):
    """fp32 values [BLOCK_HEADS, n] as they are kept: over their heads' scales [BLOCK_HEADS, 1] if any, rounded once."""
    if scale is not None:
        values = values / scale
    if dtype == tl.float8e4nv:
        # By hand: only some GPUs' casts saturate, and e4m3 has no infinity to overflow to.
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values.to(dtype)


@triton.jit
def qk_norm_rope_scatter_head_tile_rotate(
    x_ptr,
    out_ptr,
    weight_ptr,
    scale_ptr,
    cos_ptr,
    sin_ptr,
    stride_x_h,
    stride_out_h,
    heads,
    first_head,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads first_head and on of one token, from x to out. cos_ptr and sin_ptr point at its position's row."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    offs_h = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    mask_h = offs_h < heads
    wide_h = offs_h.to(tl.int64)  # a head-major stride times a head can pass 2**31
    x_ptrs = x_ptr + wide_h * stride_x_h  # [BLOCK_HEADS, 1]
    out_ptrs = out_ptr + wide_h * stride_out_h
    offs = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + offs, mask=offs < HALF)  # [1, BLOCK_HALF]
    sin = tl.load(sin_ptr + offs, mask=offs < HALF)
    first, second = qk_norm_rope_head_tile_load(x_ptrs, mask_h, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF)
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + offs_h, mask=mask_h, other=1.0)
    offs_rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    mask_rest = mask_h & (offs_rest < HEAD_DIM)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)  # [BLOCK_HEADS, 1]
        row = tl.arange(0, 1)[:, None]
        first_weight, second_weight = qk_norm_rope_head_tile_load(
            weight_ptr + row, row == 0, HALF, INTERLEAVED, 1, BLOCK_HALF
        )  # [1, BLOCK_HALF]
        if HEAD_DIM != 2 * HALF:  # dims past R count in the norm, and are normalized but not rotated
            rest = tl.load(x_ptrs + offs_rest, mask=mask_rest, other=0.0).to(tl.float32)
            rest_weight = tl.load(weight_ptr + offs_rest, mask=offs_rest < HEAD_DIM).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
            norm = tl.rsqrt(squares / HEAD_DIM + eps)
            rest = qk_norm_rope_scatter_head_tile_stored(rest * norm * rest_weight, scale, dtype)
            tl.store(out_ptrs + offs_rest, rest, mask=mask_rest)
        else:
            norm = tl.rsqrt(squares / HEAD_DIM + eps)
        first = first * norm * first_weight
        second = second * norm * second_weight
    elif HEAD_DIM != 2 * HALF and not IN_PLACE:  # queries' dims past R are where they belong
        rest = tl.load(x_ptrs + offs_rest, mask=mask_rest).to(tl.float32)
        tl.store(out_ptrs + offs_rest, qk_norm_rope_scatter_head_tile_stored(rest, scale, dtype), mask=mask_rest)
    # One rounding, after the norm, the rotation and the scale.
    rotated_first = qk_norm_rope_scatter_head_tile_stored(first * cos - second * sin, scale, dtype)
    rotated_second = qk_norm_rope_scatter_head_tile_stored(second * cos + first * sin, scale, dtype)
    if INTERLEAVED:
        offs_pairs = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        pairs = tl.interleave(rotated_first, rotated_second)  # [BLOCK_HEADS, 2 BLOCK_HALF]
        tl.store(out_ptrs + offs_pairs, pairs, mask=mask_h & (offs_pairs < 2 * HALF))
    else:
        tl.store(out_ptrs + HALF + offs, rotated_second, mask=mask_h & (offs < HALF))
        tl.store(out_ptrs + offs, rotated_first, mask=mask_h & (offs < HALF))


@triton.jit
def qk_norm_rope_scatter_head_tile_copy(
    x_ptr,
    out_ptr,
    scale_ptr,
    stride_x_h,
    stride_out_h,
    heads,
    first_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Values: heads first_head and on of one token, from x to their slot."""
    offs_h = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = (offs_h < heads) & (offs_d < HEAD_DIM)
    wide_h = offs_h.to(tl.int64)
    values = tl.load(x_ptr + wide_h * stride_x_h + offs_d, mask=mask).to(tl.float32)  # [BLOCK_HEADS, BLOCK_D]
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + offs_h, mask=offs_h < heads, other=1.0)
    stored = qk_norm_rope_scatter_head_tile_stored(values, scale, out_ptr.dtype.element_ty)
    tl.store(out_ptr + wide_h * stride_out_h + offs_d, stored, mask=mask)


@triton.jit
def qk_norm_rope_scatter_head_tile(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_cos_l,
    stride_sin_l,
    stride_k_cache_p,
    stride_k_cache_s,
    stride_k_cache_h,
    stride_v_cache_p,
    stride_v_cache_s,
    stride_v_cache_h,
    q_heads,
    kv_heads,
    q_tiles,
    eps,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31
    tile = tl.program_id(1)
    wait_for_earlier_launches()
    position = tl.load(positions_ptr + token)  # int64, and so are the offsets made of it
    cos_ptr += position * stride_cos_l
    sin_ptr += position * stride_sin_l
    if tile < q_tiles:
        qk_norm_rope_scatter_head_tile_rotate(
            q_ptr + token * stride_q_t,
            q_ptr + token * stride_q_t,
            q_weight_ptr,
            None,
            cos_ptr,
            sin_ptr,
            stride_q_h,
            stride_q_h,
            q_heads,
            tile * BLOCK_HEADS,
            eps,
            HEAD_DIM,
            HALF,
            INTERLEAVED,
            True,
            BLOCK_HEADS,
            BLOCK_HALF,
            BLOCK_REST,
        )
    else:
        slot = tl.load(slots_ptr + token)  # int64 too
        if slot >= 0:
            first_head = (tile - q_tiles) * BLOCK_HEADS
            page = slot // PAGE_SIZE  # a shift where the page size is a power of two
            offset = slot % PAGE_SIZE
            qk_norm_rope_scatter_head_tile_copy(
                v_ptr + token * stride_v_t,
                v_cache_ptr + page * stride_v_cache_p + offset * stride_v_cache_s,
                v_scale_ptr,
                stride_v_h,
                stride_v_cache_h,
                kv_heads,
                first_head,
                HEAD_DIM_V,
                BLOCK_HEADS,
                BLOCK_V,
            )
            qk_norm_rope_scatter_head_tile_rotate(
                k_ptr + token * stride_k_t,
                k_cache_ptr + page * stride_k_cache_p + offset * stride_k_cache_s,
                k_weight_ptr,
                k_scale_ptr,
                cos_ptr,
                sin_ptr,
                stride_k_h,
                stride_k_cache_h,
                kv_heads,
                first_head,
                eps,
                HEAD_DIM,
                HALF,
                INTERLEAVED,
                False,
                BLOCK_HEADS,
                BLOCK_HALF,
                BLOCK_REST,
            )


def launch(
    run: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    interleaved: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    # Twice the heads over an 8-bit cache: 16 values a thread, which is what a 16-byte store of it takes.
    block_heads = run.config["BLOCK_HEADS"] * (2 if k_cache.element_size() == 1 else 1)
    grid, arguments = rotary_arguments(q, k, cos, sin, positions, q_weight, k_weight, eps, interleaved, block_heads)
    run.launch(
        qk_norm_rope_scatter_head_tile,
        grid,
        **arguments,
        **pointers(
            "v[th] k_cache[psh] v_cache[psh] slots k_scale v_scale", v, k_cache, v_cache, slots, k_scale, v_scale
        ),
        PAGE_SIZE=k_cache.shape[1],
        HEAD_DIM_V=v.shape[2],
        BLOCK_V=triton.next_power_of_2(v.shape[2]),
    )


VARIANT = Variant(
    wins="everywhere: the row is read once and written once, in one launch",
    launch=launch,
    configs=CONFIGS,
    # 16 heads of 128 over 4 warps are 16-byte accesses to each half of a head (8 heads: 8 bytes; 8 over 2 warps: the
    # angles go through shared memory, seen in the machine code). One token of Qwen3-4B is 3 programs of equal bytes:
    # two of queries, one of keys and values. gfx942 has 64 threads in a warp. Interpreted, 5 and 7 heads are two tiles.
    default={
        "": Config(BLOCK_HEADS=16),
        "gfx942": Config(BLOCK_HEADS=16, num_warps=2),
        "interpreter": Config(BLOCK_HEADS=4),
    },
    supports=unsupported_kv,
    key=("Hq", "Hkv", "D", "Dv", "R"),
    deterministic=True,
    batch_invariant=True,
)
