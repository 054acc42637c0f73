"""One program moves a tile of one token's heads, keys and values together, to the slot that it reads on the device.

Wins everywhere so far: it is a copy, each byte is moved once by 16-byte accesses, and skipped rows cost one load.
"""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.ops.arguments import pointers
from tkernels.ops.paged_cache import unsupported_kv

CONFIGS = tuple(
    Config(BLOCK_HEADS=heads, num_warps=warps)
    for heads, warps in ((1, 1), (2, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8))
)


@triton.jit
def kv_scatter_token_per_program_heads(
    source_ptr,
    cache_ptr,
    scale_ptr,
    stride_source_h,
    stride_cache_h,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copies this program's heads from one token's row to its slot."""
    offs_h = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_h < heads)[:, None] & (offs_d < HEAD_DIM)[None, :]
    wide_h = offs_h.to(tl.int64)[:, None]  # a head-major stride times a head can pass 2**31
    values = tl.load(source_ptr + wide_h * stride_source_h + offs_d[None, :], mask=mask)  # [BLOCK_HEADS, BLOCK_D]
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + offs_h, mask=offs_h < heads, other=1.0)
        values = values.to(tl.float32) / scale[:, None]
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        # By hand: only some GPUs' casts saturate, and e4m3 has no infinity to overflow to.
        values = tl.minimum(tl.maximum(values.to(tl.float32), -448.0), 448.0)
    tl.store(cache_ptr + wide_h * stride_cache_h + offs_d[None, :], values.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def kv_scatter_token_per_program(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    stride_k_t,
    stride_k_h,
    stride_v_t,
    stride_v_h,
    stride_k_cache_p,
    stride_k_cache_s,
    stride_k_cache_h,
    stride_v_cache_p,
    stride_v_cache_s,
    stride_v_cache_h,
    heads,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)  # T * stride can pass 2**31
    slot = tl.load(slots_ptr + token)  # int64, and so is every offset made of it
    if slot >= 0:
        page = slot // PAGE_SIZE  # a shift where the page size is a power of two
        offset = slot % PAGE_SIZE
        kv_scatter_token_per_program_heads(
            k_ptr + token * stride_k_t,
            k_cache_ptr + page * stride_k_cache_p + offset * stride_k_cache_s,
            k_scale_ptr,
            stride_k_h,
            stride_k_cache_h,
            heads,
            HEAD_DIM_K,
            BLOCK_HEADS,
            BLOCK_K,
        )
        kv_scatter_token_per_program_heads(
            v_ptr + token * stride_v_t,
            v_cache_ptr + page * stride_v_cache_p + offset * stride_v_cache_s,
            v_scale_ptr,
            stride_v_h,
            stride_v_cache_h,
            heads,
            HEAD_DIM_V,
            BLOCK_HEADS,
            BLOCK_V,
        )


def launch(
    run: Run,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    tokens, heads, head_dim_k = k.shape
    head_dim_v, block_heads = v.shape[2], run.config["BLOCK_HEADS"]
    layout = "k[th] v[th] k_cache[psh] v_cache[psh] slots k_scale v_scale"
    run.launch(
        kv_scatter_token_per_program,
        (tokens, triton.cdiv(heads, block_heads)),
        **pointers(layout, k, v, k_cache, v_cache, slots, k_scale, v_scale),
        heads=heads,
        PAGE_SIZE=k_cache.shape[1],
        HEAD_DIM_K=head_dim_k,
        HEAD_DIM_V=head_dim_v,
        BLOCK_HEADS=block_heads,
        BLOCK_K=triton.next_power_of_2(head_dim_k),
        BLOCK_V=triton.next_power_of_2(head_dim_v),
    )


VARIANT = Variant(
    wins="everywhere: a copy that moves each byte once",
    launch=launch,
    configs=CONFIGS,
    # 8 heads of 128 are 16 elements a thread: 16-byte accesses, those to an fp8 cache too. Interpreted, 5 heads are two
    # tiles.
    default={"": Config(BLOCK_HEADS=8, num_warps=2), "interpreter": Config(BLOCK_HEADS=4)},
    supports=unsupported_kv,
    key=("Hkv", "D", "Dv"),
    deterministic=True,
    batch_invariant=True,
)
