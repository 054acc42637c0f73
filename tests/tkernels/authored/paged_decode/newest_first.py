"""One program per sequence and KV head, as one_pass, which it was copied from, but the newest keys first."""

import torch
import triton
import triton.language as tl

from tkernels import Config, Run, Variant
from tkernels.language import INTERPRETING, dot, wait_for_earlier_launches
from tkernels.ops.paged_decode._attend import all_but_stages, part_arguments, result_arguments, unsupported

# Page ids are loaded a stage before the keys that wait for them, so two stages more are one block of keys more in
# flight: for sm_90 at D 128, 64 keys take 36 KB of shared memory with 3 or 4 stages, 70 KB with 5 or 6, 103 KB with 7.
CONFIGS = (
    *(
        Config(BLOCK_N=block, num_warps=warps, num_stages=stages)
        for block, warps, stages in (
            (16, 2, 5),
            (32, 2, 3),
            (32, 2, 5),
            (32, 4, 5),
            (32, 4, 7),
            (64, 4, 2),
            (64, 4, 3),
            (64, 4, 5),
            (64, 8, 5),
            (128, 4, 3),
            (128, 8, 3),
            (128, 8, 5),
        )
    ),
    Config(BLOCK_N=64, num_warps=4, num_stages=5, launch_pdl=1),
)


# The work begins here: what runs on the device.


@triton.jit
def heads_of_tile(tile, GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_H: tl.constexpr):
    """(KV head, query heads [BLOCK_H], which of them exist). A KV head has one tile, or several if over 32."""
    kv_head = (tile // TILES).to(tl.int64)
    offs_g = tile % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    return kv_head, kv_head * GROUP + offs_g, offs_g < GROUP


@triton.jit
def fp16_queries(q):
    """q [BLOCK_H, BLOCK_D] as fp16 of at most 2, and the powers of two [BLOCK_H] that it was divided by."""
    wide = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1.1754943508222875e-38)  # the smallest normal fp32
    units = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # without its mantissa
    return (wide / units[:, None]).to(tl.float16), units


@triton.jit
def fp16_codes(codes, AS_LOADED: tl.constexpr):
    """e4m3 codes [...] as fp16, which holds each of them: two by an instruction, from halves of a register. Triton's
    own conversion takes the codes apart first: 883 instructions to a block of 64 keys on sm_90, and 468 with this one.

    AS_LOADED: they are converted in the layout of their load, where an operation that is not pure stays, and go through
    shared memory as fp16; otherwise in that of the product's operand, and go through it as codes.
    """
    if INTERPRETING:
        return codes.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=not AS_LOADED,
            pack=4,
        )


@triton.jit
def attend_keys(
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2,
    sequence, kv_head, heads, mask_g, begin, first, end,
    stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The part of one sequence's query heads [BLOCK_H], all of one KV head, over the keys first .. end-1, in blocks
    that start at `begin`. Every block must hold a key.

    Keys and values are the rows of the products and the heads their columns: a matrix instruction has 16 rows and 8
    columns, and a group of 4 query heads pads the smaller side.

    Returns acc [BLOCK_H, BLOCK_DV], m and l [BLOCK_H].
    """
    BLOCK_H: tl.constexpr = heads.shape[0]
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_rows = q_ptr + sequence * stride_q_b + heads * stride_q_h
    q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask_g[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if k_scale_ptr is not None:
        scale_log2 = scale_log2 * tl.load(k_scale_ptr + kv_head)
    scales = tl.full([BLOCK_H], 1.0, tl.float32) * scale_log2
    if k_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        # e4m3 becomes fp16 two at a time, bf16 only by way of it, one at a time. So the queries turn fp16: divided by a
        # power of two that brings each head's largest to 1 .. 2, they lose nothing that fp32 sums would keep.
        q, units = fp16_queries(q)
        scales *= units
    k_ptr += kv_head * stride_k_h
    v_ptr += kv_head * stride_v_h
    table_ptr = tables_ptr + sequence * stride_table_b
    # No stride is negative: a product of two numbers of 32 bits without a sign is one instruction of three.
    tl.assume(stride_k_p >= 0)
    tl.assume(stride_k_s >= 0)
    tl.assume(stride_v_p >= 0)
    tl.assume(stride_v_s >= 0)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    # The weights' sum of each place in a block, added up once at the end: a sum over keys passes from lane to lane and
    # from warp to warp.
    l = tl.zeros([BLOCK_N, BLOCK_H], tl.float32)  # noqa: E741
    acc = tl.zeros([BLOCK_DV, BLOCK_H], tl.float32)
    last = begin + (end - begin - 1) // BLOCK_N * BLOCK_N
    for done in range(0, end - begin, BLOCK_N):  # the newest keys first, which carry the most weight
        start = last - done
        keys = start + tl.arange(0, BLOCK_N)
        live = (keys >= first) & (keys < end)
        # In place of a key that is not live the nearest one is loaded, and weighs nothing. On sm_90 masks took 75 of
        # 638 instructions to a block, and 50 of 178 registers.
        near = tl.minimum(tl.maximum(keys, first), end - 1).to(tl.uint32)
        pages = tl.load(table_ptr + near // PAGE_SIZE).to(tl.uint32).to(tl.int64)
        slots = (near % PAGE_SIZE).to(tl.int64)
        k_rows = k_ptr + pages * stride_k_p + slots * stride_k_s
        v_rows = v_ptr + pages * stride_v_p + slots * stride_v_s
        k = tl.load(k_rows[:, None] + offs_d[None, :], mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        # By their transpose, which is the product's left operand.
        v = tl.load(v_rows[None, :] + offs_dv[:, None], mask=(offs_dv < HEAD_DIM_V)[:, None], other=0.0)
        if k_ptr.dtype.element_ty == tl.float8e4nv:
            k = fp16_codes(k, False)
            # Wider tiles go to the matrix units of a warp group, ahead of which the compiler moves no impure operation.
            v = fp16_codes(v, BLOCK_H == 8)
        # [BLOCK_N, BLOCK_D] @ [BLOCK_D, BLOCK_H] -> [BLOCK_N, BLOCK_H], scaled only once the maximum is subtracted: the
        # weights that count come from small differences, which lose nothing to the size of the logits.
        qk = dot(k, tl.trans(q), tl.zeros([BLOCK_N, BLOCK_H], tl.float32))
        qk = tl.where(live[:, None], qk, float("-inf"))
        m_new = tl.maximum(m, tl.max(qk, axis=0))
        alpha = tl.exp2((m - m_new) * scales)
        p = tl.exp2((qk - m_new[None, :]) * scales[None, :])
        l = l * alpha[None, :] + p  # noqa: E741
        acc = dot(v, p.to(v.dtype), acc * alpha[None, :])  # [BLOCK_DV, BLOCK_N] @ [BLOCK_N, BLOCK_H]
        m = m_new
    return tl.trans(acc), m * scales, tl.sum(l, axis=0)


@triton.jit
def store_attention(
    out_ptr, lse_ptr, v_scale_ptr, acc, m, l, sequence, heads, mask_g,  # noqa: E741
    stride_out_b, stride_out_h, stride_lse_b, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Writes the attention of heads [BLOCK_H] from their part over all keys."""
    total = tl.maximum(l, 1.0)  # the largest weight is 1; with nothing cached: zeros, and not 0 / 0
    out = acc / total[:, None]
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + heads // GROUP, mask=mask_g)[:, None]
    offs_dv = tl.arange(0, acc.shape[1])
    rows = out_ptr + sequence * stride_out_b + heads * stride_out_h
    mask_out = mask_g[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    tl.store(rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_out)
    if lse_ptr is not None:
        lse = (m + tl.log2(total)) * 0.6931471805599453  # natural; m is -inf where nothing is cached
        tl.store(lse_ptr + sequence * stride_lse_b + heads, lse, mask=mask_g)


@triton.jit
def paged_decode_newest_first(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, tables_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, scale_log2, window,
    stride_out_b, stride_out_h, stride_lse_b, stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h,
    stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    GROUP: tl.constexpr, TILES: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    kv_head, heads, mask_g = heads_of_tile(tl.program_id(1), GROUP, TILES, BLOCK_H)
    wait_for_earlier_launches()
    length = tl.load(lens_ptr + sequence)
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    acc, m, l = attend_keys(  # noqa: E741
        q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2,
        sequence, kv_head, heads, mask_g, first // BLOCK_N * BLOCK_N, first, length,
        stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
        HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, BLOCK_N,
    )  # fmt: skip
    store_attention(
        out_ptr, lse_ptr, v_scale_ptr, acc, m, l, sequence, heads, mask_g,
        stride_out_b, stride_out_h, stride_lse_b, GROUP, HEAD_DIM_V,
    )  # fmt: skip


# What runs on the host: the grid and the kernel's arguments follow from shapes, strides and dtypes alone.
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
    part = part_arguments(run, q, k_cache, v_cache, block_tables, context_lens, scale, window, k_scale)
    grid = (q.shape[0], k_cache.shape[2] * part["TILES"])
    run.launch(paged_decode_newest_first, grid, **part, **result_arguments(out, lse, v_scale))


# What is declared: when it wins, what it does not support, the configs that tuning tries, and its claims.
VARIANT = Variant(
    wins="where one_pass does, and the newest keys carry the most weight: the maximum is seldom raised",
    launch=launch,
    configs=CONFIGS,
    supports=unsupported,
    limits={"BLOCK_N": (16, 256)},  # a tensor core's tile has 16 keys at least
    default={
        "": Config(BLOCK_N=32, num_warps=4, num_stages=4),  # five programs to 100 KB of shared memory, two over e4m3
        "sm_80": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        "sm_90": Config(BLOCK_N=64, num_warps=4, num_stages=5),
        # A stage less: over an e4m3 cache, 5 spill 4 bytes; and four programs fit.
        "sm_100": Config(BLOCK_N=64, num_warps=4, num_stages=4),
        "gfx942": Config(BLOCK_N=32, num_warps=4, num_stages=2),
        "interpreter": Config(BLOCK_N=32, num_warps=4, num_stages=1),
    },
    key=("B", "N", "Hq", "Hkv", "D", "Dv", "S"),
    sum_order=all_but_stages,
    deterministic=True,
    batch_invariant=True,
)
