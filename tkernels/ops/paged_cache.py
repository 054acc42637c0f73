"""What the attention ops over a paged KV cache share: their axes, the gather of pages, and seeded inputs with nasty
edges.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import Inputs, lay_out_like
from tkernels.contract import Argument, Axes, Axis, Choice, Constraint, Int, Scalar, Tensor, dtype_axis
from tkernels.device import DeviceFacts, unsupported_e4m3
from tkernels.inputs import KINDS, MOST_DRAWN, Draws, dtype_of, fill, on_grid, poison
from tkernels.ops.softmax import LOG2_E, capped

LAYOUTS = ("contiguous", "head_major", "fused", "padded")

# Powers of two, so that scaling the scale back is exact: the logits stay ordinary while q.k leaves fp16's range. fp8
# has 448 as its largest value and 2**-6 as its smallest normal one.
_AMPLITUDE = {"ordinary": 1.0, "huge": 128.0, "tiny": 2.0**-10, "peaked": 1.0, "sunken": 1.0, "light": 1.0}
_FP8_AMPLITUDE = {**_AMPLITUDE, "huge": 64.0, "tiny": 2.0**-6}

_DEPTH = 250.0  # of sunken logits, give or take a third of it: as weights they are 0 in fp32

_LIGHT = 20  # every key but a context's first weighs 2**-20 of that one, and its values are 2**20 times as large

_DRAWN_FLOATS = 1 << 20  # from this many, values repeat: a benchmark's gigabytes need not all be drawn

KV_DTYPE = Constraint("kv == activation or kv == 'float8_e4m3fn'")

SIZE_AXES: tuple[Axis, ...] = (
    Choice(
        "lengths",
        ("edges",),
        "how long the contexts are: at edges, the same behind an empty one, near the end of a long table, or all N*S",
        legal=("edges", "gaps", "long", "full"),
        batch=True,
        wide=("long",),
    ),
    Int("S", 1, 256, (1, 2, 8, 32, 256, 16), "page size in tokens"),
    Int(
        "N",
        1,
        2**31 - 1,
        (1, 2, 3, 5, 9, 17, 40, 64, 130),
        "width of the block table in pages",
        batch=True,
        wide=(63, 127, 300, 600, 1020),
        classes=(256,),
    ),
    Int("P", 1, 2**31 - 1, (1, 3, 8, 16, 32, 136, 400), "pages in the pool", wide=(136, 400, 1400)),
    Int("Hkv", 1, 65535, (1, 3, 2), "KV heads"),
    Int("Hq", 1, 65535, (1, 2, 3, 4, 6, 20, 8), "query heads", wide=(8,)),
    Int("D", 16, 256, (16, 32, 64, 80, 96, 100, 256, 128), "head size of queries and keys"),
    Int("Dv", 16, 256, (16, 32, 64, 80, 96, 100, 256, 128), "head size of values"),
    dtype_axis("activation"),
    dtype_axis("kv", "float8_e4m3fn"),
)

OPTION_AXES: tuple[Axis, ...] = (
    Int(
        "window",
        0,
        2**31 - 1,
        (0, 1, 17, 40, 100, 300),
        "keys that a query sees, itself included; 0 is all",
        wide=(0, 700),
    ),
    Choice("k_scale", (False, True), "keys are stored divided by a scale per KV head"),
    Choice("v_scale", (False, True), "values are stored divided by a scale per KV head"),
    # One that the logits stay below, and one that presses most of them together.
    Int("soft_cap", 0, 2**31 - 1, (0, 30, 1), "what logits are capped at, rounded up; 0 is no cap"),
    Choice("sinks", (False, True), "each query head has a logit more, without a key"),
    Choice("return_lse", (False, True), "the log-sum-exp of the logits is returned too"),
    Choice("bound", ("none", "exact", "loose"), "what max_context_len is given", batch=True),
    Choice("layout", LAYOUTS),
    # Of a thousand keys a peak leaves one, and nothing to compute.
    Choice("values", (*KINDS, "peaked"), legal=(*KINDS, "peaked", "sunken", "light"), wide=KINDS),
)

OPTION_ARGUMENTS: dict[str, Argument] = {
    "scale": Scalar(float, low=2.0**-126),
    "max_context_len": Scalar(int, optional=True, low=0),
    "window": Scalar(int, optional=True, low=1, axis=True),
    "k_scale": Tensor("Hkv", "float32", optional=True),
    "v_scale": Tensor("Hkv", "float32", optional=True),
    "soft_cap": Scalar(float, optional=True, low=2.0**-126, axis=True),
    "sinks": Tensor("Hq", "float32", optional=True),
    "return_lse": Scalar(bool, axis=True),
}

PER_HEAD = ("k_scale", "v_scale", "sinks")
"""The options that are a number for each head, of which a program reads its own."""

CONSTRAINTS = (
    Constraint("S & (S - 1) == 0"),
    Constraint("Hq % Hkv == 0"),
    KV_DTYPE,
    # Draws alone have `lengths`, so these bound what is drawn and not what may be called.
    Constraint("lengths != 'edges' or 48 <= N * S <= 320"),
    Constraint("lengths != 'edges' or P * S <= 4096"),
    # A table of each page size, and of a thousand keys: a hundred blocks, which take an interpreter a second.
    Constraint("lengths != 'long' or 1000 <= N * S <= 1300"),
    Constraint("lengths != 'long' or P * S <= 16384"),
    Constraint("lengths != '' and B * N <= P"),
)

CORNERS: dict[str, Axes] = {
    # A context of one part, all of whose weights would be 0 beside a key of logit 0.
    # In 16 bits, whose rounding is above what logits of that size lose in fp32.
    # Neither a cap, which would lift them, nor a sink, which would be all there is.
    "sunken_logits": {
        **{"B": 3, "S": 16, "N": 5, "P": 16, "Dv": 64, "values": "sunken", "activation": "bfloat16"},
        **{"soft_cap": 0, "sinks": False},
    },
    # Keys that weigh less than 1e-6 and make up the result: parts, pages and keys are dropped by a weight in vain.
    "light_keys": {
        **{"B": 2, "S": 16, "N": 9, "P": 32, "Dv": 64, "window": 0},
        **{"activation": "bfloat16", "kv": "bfloat16", "values": "light", "soft_cap": 0, "sinks": False},
    },
    # Four thousand keys: pages, blocks of keys and splits by the hundred.
    "long_context": {
        **{"lengths": "full", "B": 1, "S": 16, "N": 264, "P": 264, "Hkv": 1, "Hq": 2, "D": 64, "Dv": 64},
        **{"activation": "float16", "kv": "float16", "window": 0, "values": "ordinary"},
    },
    # A page for each of four thousand keys.
    "wide_table": {
        **{"lengths": "full", "B": 1, "S": 1, "N": 4100, "P": 4100, "Hkv": 1, "Hq": 2, "D": 16, "Dv": 16},
        **{"window": 0, "values": "ordinary"},
    },
    # Of no keys the log-sum-exp is -inf; a pair of axes does not say which contexts are empty.
    "empty_context": {
        **{"B": 3, "S": 16, "N": 5, "P": 16, "lengths": "gaps", "return_lse": True},
        **{"soft_cap": 0, "sinks": False},
    },
    # With a sink it is the sink's.
    "empty_context_with_sinks": {
        **{"B": 3, "S": 16, "N": 5, "P": 16, "lengths": "gaps", "sinks": True, "return_lse": True}
    },
    # Tiles are for the wider of both, which values are here.
    "wide_values": {"B": 2, "S": 16, "N": 5, "P": 16, "Hkv": 1, "Hq": 2, "D": 64, "Dv": 256},
    # More heads to a KV head than a tile has rows.
    "large_groups": {"B": 1, "S": 16, "N": 5, "P": 16, "Hkv": 2, "Hq": 130, "D": 16, "Dv": 32},
}

BENCHMARK_AXES: Axes = {
    "lengths": "full",
    "activation": "bfloat16",
    "kv": "bfloat16",
    "D": 128,
    "Dv": 128,
    "window": 0,
    "k_scale": False,
    "v_scale": False,
    "return_lse": False,
    "bound": "exact",
    "layout": "contiguous",
    "values": "ordinary",
}
"""What every benchmark point has in common: Qwen3's and Llama's head size, contexts as long as the table is wide. A cap
and sinks are left open, which is without.
"""

INSPECTED: Mapping[str, Axes] = {"cap_and_sinks": {"soft_cap": 50, "sinks": True}}


def unsupported_kv(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a Triton kernel cannot read or write this cache's dtype on a device, or None where it can."""
    return unsupported_e4m3(device) if axes["kv"] == "float8_e4m3fn" else None


def as_bits(cache: torch.Tensor) -> torch.Tensor:
    """An fp8 cache as bytes, which every torch operation can move; any other cache as it is."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values as a cache of the dtype keeps them: rounded, and for fp8 saturated first."""
    return (values.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else values).to(dtype)


def select_pages(cache: torch.Tensor, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The pages [n] of a cache [P, S, H, D], contiguous, in a dtype that computes: [n, S, H, D]."""
    return as_bits(cache).index_select(0, pages).view(cache.dtype).to(dtype)


def live_rows(
    context_lens: torch.Tensor, width: int, page_size: int, first_keys: torch.Tensor | None = None
) -> torch.Tensor:
    """[B, N*S] bool: which cached rows are before the end of their context and on no page wholly before `first_keys`
    [B], where those are given.
    """
    positions = torch.arange(width * page_size, device=context_lens.device)
    live = positions < context_lens[:, None]
    if first_keys is not None:
        live &= positions >= (first_keys // page_size * page_size)[:, None]
    return live


def gather_context(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    first_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """The cached rows of each sequence, in order, zeros where `live_rows` says they are dead: [P, S, H, D] ->
    [B, N*S, H, D], contiguous, of the cache's dtype.

    Nothing is read through a table entry past the context or wholly before the first key, and no value of theirs comes
    through, NaN included.
    """
    (sequences, width), (_, page_size, heads, dim) = block_tables.shape, cache.shape
    live = live_rows(context_lens, width, page_size, first_keys)  # [B, N*S]
    pages = torch.where(live[:, ::page_size], block_tables, 0)
    rows = as_bits(cache).index_select(0, pages.flatten()).view(sequences, width * page_size, heads * dim)
    zero_rows(rows, live)
    return rows.view(cache.dtype).view(sequences, width * page_size, heads, dim)


def zero_rows(rows: torch.Tensor, live: torch.Tensor) -> None:
    """Writes zeros, over NaN too, to the rows [B, L, ...] that `live` [B, L] does not name. `rows` is contiguous."""
    # Zeroing bits: NaN * 0 is NaN, and masked_fill with a broadcast mask takes ten times as long. The mask is of the
    # bits' dtype, without which the product is slower too (3584 rows of 64 on one core: 22 us, 36 us, masked_fill 257).
    bits = {1: torch.int8, 2: torch.int16}.get(rows.element_size(), torch.int32)
    rows.view(bits).flatten(2).mul_(live.to(bits).unsqueeze(-1))


def padded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dense attention, as fast as torch does it, of M queries per sequence over L gathered keys.

    Args:
        q: [B, M, Hq, D].
        k: [B, L, Hkv, D].
        v: [B, L, Hkv, Dv].
        visible: [B, M, L] bool, no row all false; None is causal from the first key on.

    Returns:
        out [B, M, Hq, Dv] as q, and the log-sum-exp [B, M, Hq] in fp32 (fp64 of fp64) where it is asked for.
    """
    (batch, rows, heads, _), (keys, heads_kv, dim_v) = q.shape, v.shape[1:]
    scaled_q = q if k_scale is None else q * k_scale.repeat_interleave(heads // heads_kv).unsqueeze(-1)
    q = scaled_q.to(q.dtype)
    beyond_sdpa = soft_cap is not None or sinks is not None
    if visible is None and (return_lse or beyond_sdpa or q.dtype.itemsize > 2):
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril().expand(batch, rows, keys)
    # Added to the logits, which takes SDPA less time than its own conversion of a bool mask.
    mask = None if visible is None else q.new_zeros(visible.shape).masked_fill_(~visible, -math.inf)  # [B, M, L]
    grouped = q.unflatten(2, (heads_kv, heads // heads_kv)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, M, D]
    lse = None
    if beyond_sdpa:
        assert mask is not None
        out, lse = _capped_attention(grouped, k, v, mask, scale, soft_cap, sinks)
    elif q.dtype.itemsize > 2:
        assert mask is not None
        out = _exact_attention(grouped, k, v, mask, scale)
    elif rows == 1:  # the heads of a group are queries to the same keys
        bias = None if mask is None else mask.unsqueeze(1)
        out = F.scaled_dot_product_attention(
            grouped.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=scale
        ).unsqueeze(3)
    else:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=None if mask is None else mask.unsqueeze(1),
            is_causal=mask is None,
            scale=scale,
            enable_gqa=heads != heads_kv,
        ).unflatten(1, (heads_kv, heads // heads_kv))
    out = out.permute(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim_v)  # [B, Hkv, G, M, Dv] -> [B, M, Hq, Dv]
    if v_scale is not None:
        out = (out * v_scale.repeat_interleave(heads // heads_kv).unsqueeze(-1)).to(out.dtype)
    if not return_lse:
        return out, None
    if lse is not None:
        return out, lse.permute(0, 3, 1, 2).flatten(2)
    assert mask is not None
    wide = torch.promote_types(q.dtype, torch.float32)
    wide_q = scaled_q.to(wide).unflatten(2, (heads_kv, heads // heads_kv))  # [B, M, Hkv, G, D]
    logits = torch.einsum("bmhgd,blhd->bmhgl", wide_q, k.to(wide)) * scale + mask[:, :, None, None].to(wide)
    return out, logits.logsumexp(-1).flatten(2)


def _exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [B, Hkv, G, M, D], k [B, L, Hkv, D], v [B, L, Hkv, Dv], mask [B, M, L] -> [B, Hkv, G, M, Dv].

    For fp32 and fp64: on a CPU both SDPA and softmax approximate exp to 20 ulp, which fp32 shows. Products of one KV
    head at a time take strided keys as they are. One core, 32 sequences of 128 keys: 161 us, SDPA 198 us.
    """
    batch, heads_kv, group, rows, dim = q.shape
    bias = mask.unsqueeze(1).expand(batch, group, rows, -1).flatten(1, 2)  # [B, G*M, L]
    logits = q.new_empty(heads_kv, *bias.shape)
    for head in range(heads_kv):
        queries = q[:, head].reshape(batch, group * rows, dim)
        torch.baddbmm(bias, queries, k[:, :, head].transpose(1, 2), out=logits[head])
    # exp2 is as exact as exp and takes a third of its time on a CPU (2.9 us, 8.5 us for 8192 values).
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True)).mul_(scale * LOG2_E).exp2_()
    out = q.new_empty(heads_kv, batch, group * rows, v.shape[-1])
    for head in range(heads_kv):
        torch.bmm(weights[head], v[:, :, head], out=out[head])
    out.div_(weights.sum(dim=-1, keepdim=True))
    return out.unflatten(2, (group, rows)).transpose(0, 1)


def _capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Hkv, G, M, D], k [B, L, Hkv, D], v [B, L, Hkv, Dv], mask [B, M, L] -> [B, Hkv, G, M, Dv] and the
    log-sum-exp [B, Hkv, G, M] in fp32 (fp64 of fp64).

    What SDPA has no word for. As it, logits are fp32, and weights of the values' dtype.
    """
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    outs, lses = [], []
    for head in range(q.shape[1]):  # one at a time: all logits of a long prompt would not fit
        logits = torch.einsum("bgmd,bld->bgml", q[:, head].to(wide), k[:, :, head].to(wide)) * scale
        logits = capped(logits, soft_cap) + mask.unsqueeze(1).to(wide)
        top = logits.amax(dim=-1, keepdim=True)
        sink = None if sinks is None else sinks[head * group : (head + 1) * group].view(-1, 1, 1)
        if sink is not None:
            top = torch.maximum(top, sink)
        weights = logits.sub_(top).mul_(LOG2_E).exp2_()
        total = weights.sum(dim=-1, keepdim=True)
        if sink is not None:
            total += ((sink - top) * LOG2_E).exp2_()
        outs.append(torch.einsum("bgml,bld->bgmd", weights.div_(total).to(v.dtype), v[:, :, head]))
        lses.append((top + total.log()).squeeze(-1))
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)


def drawn_context_lens(draws: Draws, axes: Axes, sequences: int) -> list[int]:
    """Contexts of nothing, of one token, at the edges of pages and of key blocks, and near the table's end."""
    page, most = int(axes["S"]), int(axes["N"]) * int(axes["S"])
    if axes["lengths"] == "full":
        return [most] * sequences
    edges = (0, 1, page - 1, page, page + 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256)
    candidates = [n for n in edges if 0 <= n <= most]
    near = [n for n in (most, most - 1, most - page + 1, most - page, most - 40) if n >= 0]
    if axes["lengths"] == "long":
        return [near[int(index)] for index in draws.integers(0, len(near) - 1, (sequences,))]
    groups = [(candidates, near)[int(group)] for group in draws.integers(0, 1, (sequences,))]
    lens = [group[int(draws.integers(0, len(group) - 1, (1,)))] for group in groups]
    return [0, *lens[1:]] if axes["lengths"] == "gaps" else lens


def paged_inputs(
    axes: Axes, draws: Draws, device: torch.device, query_lens: Sequence[int], rows: int, context_lens: Sequence[int]
) -> dict[str, Any]:
    """Tensors over one pool: `rows` query rows, of which the first sum(query_lens) belong to sequences and the rest are
    NaN, the caches, the tables, and the scale of the logits.
    """
    dtype, kv_dtype, kind = dtype_of(axes["activation"]), dtype_of(axes["kv"]), str(axes["values"])
    page, pool, width = int(axes["S"]), int(axes["P"]), int(axes["N"])
    heads_q, heads, dim, dim_v = int(axes["Hq"]), int(axes["Hkv"]), int(axes["D"]), int(axes["Dv"])
    amplitude = _AMPLITUDE[kind]
    cached = _FP8_AMPLITUDE[kind] if kv_dtype == torch.float8_e4m3fn else amplitude
    window = int(axes["window"]) or None
    scale = dim**-0.5
    # A component that all queries and keys of a head share lifts the logits to about 1: around 0, a log-sum-exp can
    # cancel to far less than its terms, and eps times its size would say nothing about how exact a kernel can be.
    shared = (draws.integers(0, 1, (heads, dim)) * 2 - 1).double().to(device)
    lift = dim**-0.25
    q = on_grid(_normal(draws, (rows, heads_q, dim), device) + lift * shared.repeat_interleave(heads_q // heads, 0))
    q[sum(query_lens) :] = poison(dtype)
    free = draws.permutation(pool).to(torch.int32)
    tables = torch.full((len(context_lens), width), int(poison(torch.int32)), dtype=torch.int32)
    k_cache, v_cache = _empty_caches(axes, kv_dtype, device)
    peak = 1.0 / (lift * dim * scale)  # times `shared`, adds 1 to a key's logit
    for sequence, length in enumerate(context_lens):
        count = math.ceil(length / page)
        # Pages wholly before the window of the sequence's first query are nobody's, and hold NaN.
        passed = max(length - query_lens[sequence] + 1 - window, 0) // page if window else 0
        tables[sequence, passed:count], free = free[passed:count], free[count:]
        pages = tables[sequence, passed:count].to(device)
        k = _normal(draws, (count * page, heads, dim), device)
        k.add_((lift * shared).to(k.dtype))
        v = _normal(draws, (count * page, heads, dim_v), device)
        if kind == "peaked" and length > 0:
            for position, level in _peaks(draws, length, query_lens[sequence], window, page):
                k[position] += level * peak * shared
        if kind == "sunken":
            k -= _DEPTH * peak * shared
        if kind == "light":
            k[1:] -= _LIGHT / LOG2_E * peak * shared
            v[1:] *= 2.0**_LIGHT
        # Peaks take products past 2**8, of which fp32 has no room for the whole grid: theirs is coarser.
        k = on_grid(k / 4) * 4 if kind in ("peaked", "sunken", "light") else on_grid(k)
        for cache, values in ((k_cache, k), (v_cache, v)):
            rows_kept = values * cached
            rows_kept[length:] = poison(dtype)
            as_bits(cache)[pages] = as_bits(stored(rows_kept, kv_dtype)).view(count, *cache.shape[1:])[passed:]
    longest = max(context_lens, default=0)
    return {
        "q": _laid_out_queries((q * amplitude).to(dtype), axes, draws),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": draws.laid_out(tables, "contiguous" if axes["layout"] == "contiguous" else "padded").to(device),
        "context_lens": torch.tensor(list(context_lens), dtype=torch.int32, device=device),
        "scale": scale / (amplitude * cached),
        "k_scale": _head_scales(draws, heads, device) if axes["k_scale"] else None,
        "v_scale": _head_scales(draws, heads, device) if axes["v_scale"] else None,
        "max_context_len": {"none": None, "exact": longest, "loose": longest + 3 * page + 1}[str(axes["bound"])],
        "window": window,
        "soft_cap": float(axes["soft_cap"]) or None,
        "sinks": drawn_sinks(draws, heads_q) if axes["sinks"] else None,
    }


def drawn_sinks(draws: Draws, heads: int) -> torch.Tensor:
    """[Hq] float32, each of the size that a log-sum-exp has, that much below or above it, or -inf. One at least is of
    the first kind, beside which no others' rounding counts.
    """
    sinks = draws.normal((heads,), torch.float32) + 3
    kinds = draws.integers(0, 5, (heads,))  # half of them ordinary
    kinds[int(draws.integers(0, heads - 1, ()))] = 0
    apart = torch.tensor([0.0, 0.0, 0.0, -20.0, 20.0, -math.inf])[kinds]
    return sinks + apart.to(sinks.device)


def _normal(draws: Draws, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """float64 [...]; float32, on the device and repeating, where drawing them all would take seconds: each tensor from
    another place of the same numbers.
    """
    if math.prod(shape) < _DRAWN_FLOATS:
        return torch.randn(shape, generator=draws.generator, dtype=torch.float64).to(device)
    begin = int(draws.integers(0, MOST_DRAWN - 1, ()))
    return fill(draws.many_normal.roll(-begin), shape)


def _head_scales(draws: Draws, heads: int, device: torch.device) -> torch.Tensor:
    """1/2 or 1/4 for each head: powers of two keep the products exact, as on_grid means to."""
    return (0.25 * 2.0 ** draws.integers(0, 1, (heads,))).float().to(device)


def _peaks(draws: Draws, length: int, queries: int, window: int | None, page: int) -> list[tuple[int, float]]:
    """(position, addition to its logit): a key that dominates just inside an edge, and one just outside that would
    more.
    """
    row = length - 1 - int(draws.integers(0, max(queries - 1, 0), (1,)))  # one query's position
    first = max(row - window + 1, 0) if window else int(draws.integers(0, row // page, (1,))) * page
    levels = {row: 5.0, first: 8.0}
    levels |= {row + 1: 14.0}
    if window:
        levels |= {first - 1: 14.0}
    return [(position, level) for position, level in levels.items() if 0 <= position < length]


def _empty_caches(axes: Axes, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """k_cache [P, S, Hkv, D] and v_cache [P, S, Hkv, Dv], all NaN, in storage that ends in NaN."""
    pool, page, heads = int(axes["P"]), int(axes["S"]), int(axes["Hkv"])
    dims, layout = (int(axes["D"]), int(axes["Dv"])), axes["layout"]

    def storage(*shape: int) -> torch.Tensor:
        count = math.prod(shape)
        return torch.full((count + 16,), poison(dtype), dtype=dtype, device=device)[:count].view(shape)

    if layout == "fused":  # K and V of a page side by side
        both = storage(pool, 2, page, heads, max(dims))
        return both[:, 0, ..., : dims[0]], both[:, 1, ..., : dims[1]]
    if layout == "head_major":
        k, v = (storage(pool, heads, page, dim).transpose(1, 2) for dim in dims)
    elif layout == "padded":
        k, v = (storage(pool, page + 1, heads, dim + 3)[:, :page, :, :dim] for dim in dims)
    else:
        k, v = (storage(pool, page, heads, dim) for dim in dims)
    return k, v


def _laid_out_queries(q: torch.Tensor, axes: Axes, draws: Draws) -> torch.Tensor:
    """q [T, Hq, D] as a view of fused QKV rows, of head-major storage, with padded rows, or contiguous."""
    rows, heads, dim = q.shape
    if axes["layout"] == "fused":
        fused = torch.full((rows, heads + 2 * int(axes["Hkv"]), dim), poison(q.dtype), dtype=q.dtype, device=q.device)
        fused[:, :heads] = q
        return fused[:, :heads]
    return draws.laid_out(q, axes["layout"])


def count_sequences(inputs: Inputs) -> int:
    return int(inputs["context_lens"].shape[0])


def loosen_bounds(inputs: Inputs) -> dict[str, Any]:
    """The same batch behind a table with undefined entries to the right, and with a bound that is as loose as it."""
    tables, page = inputs["block_tables"], inputs["k_cache"].shape[1]
    beyond = torch.full_like(tables, int(poison(tables.dtype)))
    wider = torch.cat((tables, beyond), dim=1)  # [B, 2 N]
    bound = None if inputs["max_context_len"] is None else wider.shape[1] * page
    return {**inputs, "block_tables": lay_out_like(wider, wider), "max_context_len": bound}
