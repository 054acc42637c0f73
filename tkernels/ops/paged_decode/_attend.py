"""What the Triton variants share: attention of a tile of query heads over a range of keys, and what becomes of its
parts.

A part is (acc, m, l): the sum of the values by unnormalized weights, the maximum of the logits in units of log 2, and
the sum of the weights. Parts of disjoint ranges combine to the part of their union (Milakov and Gimelshein, 2018).
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tkernels import Axes, Buffer, Config, DeviceFacts, Run
from tkernels.language import INTERPRETING, dot
from tkernels.ops.arguments import pointers
from tkernels.ops.paged_cache import unsupported_kv
from tkernels.ops.softmax import LOG2_E, beside_sinks, tanh_of

MAX_SPLITS = 128
"""All maxima of a head's parts are held at once. As num_splits, it leaves the number to the device."""


@triton.jit
def heads_of_tile(tile, GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_H: tl.constexpr):
    """(KV head, query heads [BLOCK_H], which of them exist). A KV head has one tile, or several if over 32."""
    kv_head = (tile // TILES).to(tl.int64)
    offs_g = tile % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    return kv_head, kv_head * GROUP + offs_g, offs_g < GROUP


@triton.jit
def split_bounds(length, window, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """(first visible key, where its block begins, keys per split, splits that have any) of a context.

    Nothing but the context, the window and the config decides where the splits lie.
    """
    first = 0
    if window is not None:
        first = tl.maximum(length - window, 0)
    begin = first // BLOCK_N * BLOCK_N
    blocks = tl.cdiv(length - begin, BLOCK_N)
    per_split = tl.maximum(tl.cdiv(blocks, NUM_SPLITS), MIN_BLOCKS)
    return first, begin, per_split * BLOCK_N, tl.cdiv(blocks, per_split)


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
    q_ptr, k_ptr, v_ptr, tables_ptr, k_scale_ptr, scale_log2, cap_log2,
    sequence, kv_head, heads, mask_g, begin, first, end,
    stride_q_b, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_table_b,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The part of one sequence's query heads [BLOCK_H], all of one KV head, over the keys first .. end-1, in blocks
    that start at `begin`. Every block must hold a key. `scale_log2` and `cap_log2`: see `scale_arguments`.

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
    to_cap = scales
    if cap_log2 is not None:
        scales = tl.full([BLOCK_H], 1.0, tl.float32) * cap_log2
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
    for start in range(begin, end, BLOCK_N):
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
        if cap_log2 is not None:
            qk = tanh_of(qk * to_cap[None, :])
        qk = tl.where(live[:, None], qk, float("-inf"))
        m_new = tl.maximum(m, tl.max(qk, axis=0))
        alpha = tl.exp2((m - m_new) * scales)
        p = tl.exp2((qk - m_new[None, :]) * scales[None, :])
        l = l * alpha[None, :] + p  # noqa: E741
        acc = dot(v, p.to(v.dtype), acc * alpha[None, :])  # [BLOCK_DV, BLOCK_N] @ [BLOCK_N, BLOCK_H]
        m = m_new
    return tl.trans(acc), m * scales, tl.sum(l, axis=0)


@triton.jit
def store_part(
    acc_ptr, m_ptr, l_ptr, acc, m, l, sequence, heads, mask_g, split, stride_acc_b, stride_m_b,  # noqa: E741
    NUM_SPLITS: tl.constexpr, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Writes a part [heads] to acc [B, Hq, NUM_SPLITS, Dv], m and l [B, Hq, NUM_SPLITS], all fp32."""
    parts = heads * NUM_SPLITS + split
    offs_dv = tl.arange(0, acc.shape[1])
    rows = acc_ptr + sequence * stride_acc_b + parts * HEAD_DIM_V
    tl.store(rows[:, None] + offs_dv[None, :], acc, mask=mask_g[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    tl.store(m_ptr + sequence * stride_m_b + parts, m, mask=mask_g)
    tl.store(l_ptr + sequence * stride_m_b + parts, l, mask=mask_g)


@triton.jit
def combine_parts(
    acc_ptr, m_ptr, l_ptr, sequence, heads, mask_g, used, stride_acc_b, stride_m_b,
    NUM_SPLITS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The part that the first `used` of a sequence's parts make together, for heads [BLOCK_H]. They are added in the
    order of the splits, CHUNK at a time, so that nothing depends on who finished first.

    Returns acc [BLOCK_H, BLOCK_DV], m and l [BLOCK_H].
    """
    m_ptr += sequence * stride_m_b
    l_ptr += sequence * stride_m_b
    offs_s = tl.arange(0, BLOCK_S)
    # Past the L1, here and below: it may hold what these addresses held before another multiprocessor wrote them.
    m_parts = tl.load(
        m_ptr + heads[None, :] * NUM_SPLITS + offs_s[:, None],
        mask=(offs_s < used)[:, None] & mask_g[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    m = tl.max(m_parts, axis=0)  # [BLOCK_H]
    origin = tl.where(m == float("-inf"), 0.0, m)[None, :]
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = (offs_dv < HEAD_DIM_V)[None, None, :]
    l = tl.zeros([heads.shape[0]], tl.float32)  # noqa: E741
    acc = tl.zeros([heads.shape[0], BLOCK_DV], tl.float32)
    for start in range(0, used, CHUNK):
        splits = start + tl.arange(0, CHUNK)
        mask = (splits < used)[:, None] & mask_g[None, :]
        parts = heads[None, :] * NUM_SPLITS + splits[:, None]  # [CHUNK, BLOCK_H]
        weight = tl.exp2(tl.load(m_ptr + parts, mask=mask, other=float("-inf"), cache_modifier=".cg") - origin)
        l_parts = tl.load(l_ptr + parts, mask=mask, other=0.0, cache_modifier=".cg")
        l = l + tl.sum(l_parts * weight, axis=0)  # noqa: E741
        rows = (acc_ptr + sequence * stride_acc_b + parts * HEAD_DIM_V)[:, :, None]
        values = tl.load(
            rows + offs_dv[None, None, :], mask=mask[:, :, None] & mask_dv, other=0.0, cache_modifier=".cg"
        )
        acc += tl.sum(values * weight[:, :, None], axis=0)
    return acc, m, l


@triton.jit
def store_attention(
    out_ptr, lse_ptr, v_scale_ptr, sinks_ptr, acc, m, l, sequence, heads, mask_g,  # noqa: E741
    stride_out_b, stride_out_h, stride_lse_b, GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Writes the attention of heads [BLOCK_H] from their part over all keys, which their sinks join here alone."""
    total = tl.maximum(l, 1.0)  # the largest weight is 1; with nothing cached: zeros, and not 0 / 0
    out = acc / total[:, None]
    if sinks_ptr is not None:
        # Of the quotient, not of `acc`: beside a sum with the sink in it, gfx942 stored 2 bytes at a time.
        share, m, total = beside_sinks(m, total, tl.load(sinks_ptr + heads, mask=mask_g))
        out = out * share[:, None]
    if v_scale_ptr is not None:
        out = out * tl.load(v_scale_ptr + heads // GROUP, mask=mask_g)[:, None]
    offs_dv = tl.arange(0, acc.shape[1])
    rows = out_ptr + sequence * stride_out_b + heads * stride_out_h
    mask_out = mask_g[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    tl.store(rows[:, None] + offs_dv[None, :], out.to(out_ptr.dtype.element_ty), mask=mask_out)
    if lse_ptr is not None:
        lse = (m + tl.log2(total)) * 0.6931471805599453  # natural; m is -inf where there is nothing
        tl.store(lse_ptr + sequence * stride_lse_b + heads, lse, mask=mask_g)


def all_but_stages(config: Config) -> object:
    """What decides in which order a row's sums are added: blocks, splits, and the warps that a block's keys lie in."""
    return config.constants, config.num_warps


def unsupported(axes: Axes, device: DeviceFacts) -> str | None:
    """Why none of the Triton variants can read such a cache for such queries, or None where they can."""
    if axes["kv"] == "float8_e4m3fn" and axes["activation"] == "float32":
        return "fp8 keys widened to fp32 stay in registers, which spill (152 bytes on sm_90); queries in 16 bits do not"
    return unsupported_kv(axes, device)


def head_tile(group: int, device: DeviceFacts) -> tuple[int, int]:
    """(columns of a tile, tiles per KV head) for a group of query heads. 64 columns spill, 520 bytes on sm_100."""
    narrowest = 16 if device.arch.startswith("gfx") else 8  # of a matrix instruction
    block = max(narrowest, min(32, triton.next_power_of_2(group)))
    return block, triton.cdiv(group, block)


def keys_per_block(block: int, dim: int, queries: torch.dtype, is_doubled: bool) -> int:
    """The config's block of keys, shrunk in proportion where a row of `dim` in the queries' dtype has more than 256
    bytes; at least 16 keys. fp32 is shrunk twice: tensor cores do not take it, and a product on the other cores holds
    its operands in registers (32 keys of 128: 352 bytes spilled on sm_90; 16 keys: 80 registers).

    Args:
        is_doubled: For e4m3 in a tile of 8 heads: as many bytes, which share what a block costs whatever its size (on
            sm_90 68 instructions of each warp for 1 KiB a program, and 87 undoubled). Wider tiles would spill.
    """
    row_bytes = triton.next_power_of_2(dim) * queries.itemsize * (2 if queries.itemsize == 4 else 1)
    return max(16, block * 256 // max(256, row_bytes) * (2 if is_doubled else 1))


def max_splits(config: Config, programs: int, device: DeviceFacts) -> int:
    """NUM_SPLITS: the most parts that a context is cut into, where one sequence takes `programs` without splits.

    As many as the config says, but no more than give every multiprocessor two programs, whose loads overlap, when one
    long sequence is alone. How many sequences there are decides nothing, or a sequence's bits would depend on others.
    """
    return min(config["num_splits"], triton.cdiv(2 * device.multiprocessors, programs))


def launched_splits(num_splits: int, min_keys: int, block_n: int, longest: int, window: int | None) -> int:
    """How many splits the longest possible context can use: the grid follows from what the host knows, so that it is
    the same in every replay of a CUDA graph. Splits beyond a sequence's own leave at once; where they lie is not
    touched.
    """
    visible = longest if window is None else min(longest, window + block_n - 1)
    return max(1, min(num_splits, triton.cdiv(visible, min_keys)))


def part_chunk(num_splits: int, heads: int, dim_v: int) -> int:
    """CHUNK: how many parts of so many heads are added at once, at most 64 registers a thread at 4 warps."""
    return max(1, min(triton.next_power_of_2(num_splits), 8192 // (heads * triton.next_power_of_2(dim_v))))


def part_buffers(axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
    """The workspace of all parts: acc [B, Hq, NUM_SPLITS, Dv], m and l [B, Hq, NUM_SPLITS], fp32."""
    heads, heads_kv = int(axes["Hq"]), int(axes["Hkv"])
    programs = heads_kv * head_tile(heads // heads_kv, device)[1]
    parts = (int(axes["B"]), heads, max_splits(config, programs, device))
    sums = Buffer(parts, torch.float32)
    return {"acc": Buffer((*parts, int(axes["Dv"])), torch.float32), "m": sums, "l": sums}


def part_arguments(
    run: Run,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    k_scale: torch.Tensor | None,
) -> dict[str, Any]:
    """What every kernel that reads the cache is given, by the names that all of them use; `scale_log2` is for logits
    without a cap.
    """
    (_, heads, dim), (_, page_size, heads_kv, dim_v) = q.shape, v_cache.shape
    block_h, tiles = head_tile(heads // heads_kv, run.device)
    is_doubled = k_cache.dtype == torch.float8_e4m3fn and block_h == 8
    tensors = (q, k_cache, v_cache, block_tables, context_lens, k_scale)
    return {
        **pointers("q[bh] k[psh] v[psh] tables lens k_scale", *tensors),
        "stride_table_b": block_tables.stride(0),
        "scale_log2": scale * LOG2_E,
        "window": window,
        "GROUP": heads // heads_kv,
        "TILES": tiles,
        "HEAD_DIM": dim,
        "HEAD_DIM_V": dim_v,
        "BLOCK_H": block_h,
        "BLOCK_D": triton.next_power_of_2(dim),
        "BLOCK_DV": triton.next_power_of_2(dim_v),
        "PAGE_SIZE": page_size,
        "BLOCK_N": keys_per_block(run.config["BLOCK_N"], max(dim, dim_v), q.dtype, is_doubled),
    }


def split_arguments(
    run: Run, part: Mapping[str, Any], block_tables: torch.Tensor, max_context_len: int | None
) -> tuple[int, dict[str, Any]]:
    """How many splits to launch, and what kernels are given that leave or combine parts.

    Args:
        part: See `part_arguments`.
    """
    acc, m, l = (run.workspace[name] for name in ("acc", "m", "l"))  # noqa: E741
    num_splits, min_blocks, block_n = acc.shape[2], run.config["MIN_BLOCKS"], part["BLOCK_N"]
    longest = block_tables.shape[1] * part["PAGE_SIZE"]
    if max_context_len is not None:
        longest = min(longest, max_context_len)
    splits = launched_splits(num_splits, min_blocks * block_n, block_n, longest, part["window"])
    return splits, {**pointers("acc[b] m[b] l", acc, m, l), "NUM_SPLITS": num_splits, "MIN_BLOCKS": min_blocks}


def result_arguments(out: torch.Tensor, lse: torch.Tensor | None, v_scale: torch.Tensor | None) -> dict[str, Any]:
    """What `store_attention` is given beside sinks, as kernels take it."""
    return {**pointers("out[bh] lse v_scale", out, lse, v_scale), "stride_lse_b": out.shape[1]}
