"""The keys of a sequence are split over several programs, whose partial results a second kernel combines.

Each program does what one_pass does over its own blocks of keys and leaves its part of the softmax (sum of values,
maximum, sum of weights) in the workspace; the second kernel weighs the parts against each other ("flash decoding",
Dao et al., 2023). Where the splits lie follows from the sequence's own context alone and the parts are added in order,
so neither the batch nor the run changes a bit. Wins where sequences x KV heads are too few to fill the device.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run, Variant
from tkernels.ops.paged_decode.one_pass import attend_keys, head_tile, keys_per_block
from tkernels.ops.paged_decode.paged_cache import unsupported_kv

CONFIGS = tuple(
    Config(num_splits=splits, BLOCK_N=block, MIN_BLOCKS=blocks, REDUCE_HEADS=1, num_warps=warps, num_stages=stages)
    for splits in (4, 8, 16, 32, 64)
    for block, blocks, warps, stages in ((32, 4, 2, 5), (64, 1, 4, 3), (64, 2, 4, 5), (64, 4, 4, 5), (128, 2, 8, 5))
)


@triton.jit
def split_kv_bounds(length, window, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(first visible key, where its block begins, keys per split, splits that have any) of a context."""
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    begin = first // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(length - begin, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(blocks, NUM_SPLITS), MIN_BLOCKS)
    return first, begin, per_split * BLOCK_N, tl.cdiv(blocks, per_split)


@triton.jit
def paged_decode_split_kv_part(
    acc_ptr,
    m_ptr,
    l_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lens_ptr,
    k_scale_ptr,
    scale_log2,
    window,
    stride_acc_b,
    stride_m_b,
    stride_q_b,
    stride_q_h,
    stride_k_p,
    stride_k_s,
    stride_k_h,
    stride_v_p,
    stride_v_s,
    stride_v_h,
    stride_table_b,
    NUM_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """Partial attention of one split: acc [B, Hq, NUM_SPLITS, Dv], m and l [B, Hq, NUM_SPLITS], all fp32."""
    sequence = tl.program_id(0).to(tl.int64)
    split = tl.program_id(2)
    kv_head = (tl.program_id(1) // TILES).to(tl.int64)
    length = tl.load(lens_ptr + sequence)
    first, begin, keys_per_split, used = split_kv_bounds(length, window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
    if split < used:  # the reduction never looks at a split without keys
        offs_g = tl.program_id(1) % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
        heads = kv_head * GROUP + offs_g
        mask_g = offs_g < GROUP
        offs_d = tl.arange(0, BLOCK_D)
        q_rows = q_ptr + sequence * stride_q_b + heads * stride_q_h
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_g[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        if k_scale_ptr is not None:
            scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
        begin += split * keys_per_split
        acc, m, l = attend_keys(  # noqa: E741
            q,
            begin,
            first,
            tl.minimum(begin + keys_per_split, length),
            k_ptr + kv_head * stride_k_h,
            v_ptr + kv_head * stride_v_h,
            tables_ptr + sequence * stride_table_b,
            stride_k_p,
            stride_k_s,
            stride_v_p,
            stride_v_s,
            scale_log2,
            HEAD_DIM,
            HEAD_DIM_V,
            BLOCK_DV,
            PAGE_SIZE,
            BLOCK_N,
        )
        parts = heads * NUM_SPLITS + split  # [BLOCK_H]
        offs_dv = tl.arange(0, BLOCK_DV)
        acc_rows = acc_ptr + sequence * stride_acc_b + parts * HEAD_DIM_V
        mask_acc = mask_g[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        tl.store(acc_rows[:, None] + offs_dv[None, :], acc, mask=mask_acc)
        tl.store(m_ptr + sequence * stride_m_b + parts, m, mask=mask_g)
        tl.store(l_ptr + sequence * stride_m_b + parts, l, mask=mask_g)


@triton.jit
def paged_decode_split_kv_reduce(
    out_ptr,
    lse_ptr,
    acc_ptr,
    m_ptr,
    l_ptr,
    lens_ptr,
    v_scale_ptr,
    window,
    heads,
    stride_out_b,
    stride_out_h,
    stride_lse_b,
    stride_acc_b,
    stride_m_b,
    NUM_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):
    """Weighs the parts of BLOCK_H heads of one sequence against each other."""
    sequence = tl.program_id(0).to(tl.int64)
    offs_h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    mask_h = offs_h < heads
    splits = tl.arange(0, BLOCK_S)
    _, _, _, used = split_kv_bounds(tl.load(lens_ptr + sequence), window, NUM_SPLITS, BLOCK_N, MIN_BLOCKS)
    parts = offs_h[None, :] * NUM_SPLITS + splits[:, None]  # [BLOCK_S, BLOCK_H]
    mask = (splits < used)[:, None] & mask_h[None, :]
    m = tl.load(m_ptr + sequence * stride_m_b + parts, mask=mask, other=float("-inf"))
    l = tl.load(l_ptr + sequence * stride_m_b + parts, mask=mask, other=0.0)  # noqa: E741
    m_max = tl.max(m, axis=0)  # [BLOCK_H]
    weight = tl.exp2(m - tl.where(m_max == float("-inf"), 0.0, m_max)[None, :])  # 0 of a split without keys
    total = tl.sum(l * weight, axis=0)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < HEAD_DIM_V
    acc_rows = acc_ptr + sequence * stride_acc_b + parts * HEAD_DIM_V
    acc = tl.load(
        acc_rows[:, :, None] + offs_dv[None, None, :], mask=mask[:, :, None] & mask_dv[None, None, :], other=0.0
    )
    total = tl.maximum(total, 1.0)  # the largest weight is 1; with nothing cached: zeros, and not 0 / 0
    out = tl.sum(acc * weight[:, :, None], axis=0) / total[:, None]  # [BLOCK_H, BLOCK_DV]
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + offs_h // GROUP, mask=mask_h, other=0.0)[:, None]
    out_rows = out_ptr + sequence * stride_out_b + offs_h * stride_out_h
    mask_out = mask_h[:, None] & mask_dv[None, :]
    tl.store(out_rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_out)
    if lse_ptr is not None:
        lse = (m_max + tl.log2(total)) * 0.6931471805599453  # natural; m is -inf where nothing is cached
        tl.store(lse_ptr + sequence * stride_lse_b + offs_h, lse, mask=mask_h)


def launch(
    run: Run,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    return_lse: bool,
) -> None:
    (sequences, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    num_splits, reduce_heads = run.config["num_splits"], run.config["REDUCE_HEADS"]
    block_h, tiles = head_tile(heads // heads_kv)
    acc, m, l = (run.workspace[name] for name in ("acc", "m", "l"))  # noqa: E741
    shared = {
        "acc_ptr": acc,
        "m_ptr": m,
        "l_ptr": l,
        "lens_ptr": context_lens,
        "window": window,
        "stride_acc_b": acc.stride(0),
        "stride_m_b": m.stride(0),
        "NUM_SPLITS": num_splits,
        "GROUP": heads // heads_kv,
        "HEAD_DIM_V": dim_v,
        "BLOCK_DV": triton.next_power_of_2(dim_v),
        "BLOCK_N": keys_per_block(run.config["BLOCK_N"], k_cache if dim > dim_v else v_cache),
        "MIN_BLOCKS": run.config["MIN_BLOCKS"],
    }
    run.launch(
        paged_decode_split_kv_part,
        (sequences, heads_kv * tiles, num_splits),
        **shared,
        q_ptr=q,
        k_ptr=k_cache,
        v_ptr=v_cache,
        tables_ptr=block_tables,
        k_scale_ptr=k_scale,
        scale_log2=scale * 1.4426950408889634,
        stride_q_b=q.stride(0),
        stride_q_h=q.stride(1),
        stride_k_p=k_cache.stride(0),
        stride_k_s=k_cache.stride(1),
        stride_k_h=k_cache.stride(2),
        stride_v_p=v_cache.stride(0),
        stride_v_s=v_cache.stride(1),
        stride_v_h=v_cache.stride(2),
        stride_table_b=block_tables.stride(0),
        HEAD_DIM=dim,
        BLOCK_H=block_h,
        TILES=tiles,
        BLOCK_D=triton.next_power_of_2(dim),
        PAGE_SIZE=page_size,
    )
    run.launch(
        paged_decode_split_kv_reduce,
        (sequences, triton.cdiv(heads, reduce_heads)),
        **shared,
        out_ptr=out,
        lse_ptr=lse,
        v_scale_ptr=v_scale,
        heads=heads,
        stride_out_b=out.stride(0),
        stride_out_h=out.stride(1),
        stride_lse_b=heads,
        BLOCK_H=reduce_heads,
        BLOCK_S=triton.next_power_of_2(num_splits),
    )


def workspace(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    parts = (int(axes["B"]), int(axes["Hq"]), config["num_splits"])
    return {
        "acc": Buffer((*parts, int(axes["Dv"])), torch.float32),
        "m": Buffer(parts, torch.float32),
        "l": Buffer(parts, torch.float32),
    }


VARIANT = Variant(
    wins="sequences x KV heads are too few to fill the device and contexts are long",
    launch=launch,
    configs=CONFIGS,
    # The reduction holds all splits of a head at once; a tensor core's tile has 16 keys at least.
    limits={"num_splits": (1, 128), "BLOCK_N": (16, 256), "REDUCE_HEADS": (1, 64)},
    default={
        "": Config(num_splits=16, BLOCK_N=32, MIN_BLOCKS=4, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "sm_80": Config(num_splits=16, BLOCK_N=64, MIN_BLOCKS=2, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "sm_90": Config(num_splits=16, BLOCK_N=64, MIN_BLOCKS=2, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "sm_100": Config(num_splits=16, BLOCK_N=64, MIN_BLOCKS=2, REDUCE_HEADS=1, num_warps=4, num_stages=5),
        "gfx942": Config(num_splits=16, BLOCK_N=32, MIN_BLOCKS=4, REDUCE_HEADS=1, num_warps=4, num_stages=2),
        # Interpreting costs by the program: few splits, and all heads of a sequence reduced by one.
        "interpreter": Config(num_splits=3, BLOCK_N=16, MIN_BLOCKS=1, REDUCE_HEADS=32, num_warps=4, num_stages=1),
    },
    supports=unsupported_kv,
    workspace=workspace,
    key=("Hq", "Hkv", "D", "Dv", "S"),
    deterministic=True,
    batch_invariant=True,
)
