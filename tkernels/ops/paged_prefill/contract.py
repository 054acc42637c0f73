"""paged_prefill: causal attention of packed query chunks over keys and values in pages, on top of what is cached."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, lay_out_like
from tkernels.contract import Axes, Case, Choice, Contract, Int, Output, Scalar, Tensor
from tkernels.inputs import Draws, poison
from tkernels.ops.paged_cache import (
    BENCHMARK_AXES,
    CONSTRAINTS,
    CORNERS,
    INSPECTED,
    OPTION_ARGUMENTS,
    OPTION_AXES,
    PER_HEAD,
    SIZE_AXES,
    count_sequences,
    drawn_context_lens,
    gather_context,
    loosen_bounds,
    padded_attention,
    paged_inputs,
    select_pages,
)
from tkernels.ops.softmax import capped, softmax_and_lse


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    causal: bool = True,
) -> Any:
    """softmax(scale * q . k) v of each sequence's newest tokens over its own cached tokens, themselves included.

    Args:
        q: [T, Hq, D], any float dtype, sequences end to end. Hq is a multiple of Hkv; query heads h*G .. h*G+G-1 share
            KV head h.
        k_cache: [P, S, Hkv, D], as q or fp8 (e4m3fn); S, the page size, is a power of two.
        v_cache: [P, S, Hkv, Dv], as k_cache.
        block_tables: [B, N] int32; entry i is the page of tokens i*S .. i*S+S-1. Those past ceil(context / S), and
            those wholly before the window of the sequence's first query, (context - queries + 1 - window) // S of them,
            are undefined and never dereferenced.
        cu_seqlens_q: [B+1] int32, where each sequence's tokens begin in q, from 0. A sequence may have none. Rows from
            cu_seqlens_q[-1] on belong to nobody: they are neither read nor written.
        context_lens: [B] int32, tokens in the cache, this step's included, so at least the sequence's tokens in q; at
            most N*S. The last token in q is the last in the cache. Of queries that see all keys, neither causal nor in
            a window, it does not matter where they are: there may be more of them than keys, of which there is one.
        scale: Multiplies the logits; positive.
        max_context_len: Upper bound of context_lens that the host knows, by default N*S.
        window: A query sees the last `window` keys up to its own position, itself included, at least 1; None is all.
        k_scale: [Hkv] float32, positive; the real keys are the cached ones times it.
        v_scale: [Hkv] float32, the same for values.
        soft_cap, sinks: See `paged_decode`.
        return_lse: Return the log-sum-exp of the logits too, that of a sink included.
        causal: A query sees no key after its own position. Otherwise it sees all of them, and `window` bounds the past
            only.

    Returns:
        out [T, Hq, Dv], as q; with return_lse also lse [T, Hq] float32 (float64 of float64), natural log.
    """
    (tokens, heads, _), (_, page, heads_kv, dim_v) = q.shape, v_cache.shape
    out = q.new_full((tokens, heads, dim_v), poison(q.dtype))
    lse = q.new_full((tokens, heads), poison(q.dtype))
    starts = cu_seqlens_q.tolist()
    for sequence, length in enumerate(context_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        cached = length - (rows.stop - rows.start)
        passed = max(cached + 1 - window, 0) // page if window else 0  # pages that the first query does not see
        pages = block_tables[sequence, passed : -(-length // page)]
        k = select_pages(k_cache, pages, q.dtype).flatten(0, 1)[: length - passed * page]  # [keys, Hkv, D]
        v = select_pages(v_cache, pages, q.dtype).flatten(0, 1)[: length - passed * page]
        k = k if k_scale is None else (k * k_scale[:, None]).to(k.dtype)
        v = v if v_scale is None else (v * v_scale[:, None]).to(v.dtype)
        keys = torch.arange(passed * page, length, device=q.device)
        own = torch.arange(cached, length, device=q.device).unsqueeze(1)  # [queries, 1]
        visible = (keys <= own) if causal else (keys < length).expand(own.shape[0], keys.shape[0])
        if window is not None:
            visible = visible & (keys > own - window)
        for head in range(heads_kv):  # one at a time: all logits of a long prompt would not fit
            group = slice(head * heads // heads_kv, (head + 1) * heads // heads_kv)
            logits = torch.einsum("qgd,kd->qgk", q[rows, group] * scale, k[:, head])  # [queries, G, keys]
            logits = capped(logits, soft_cap).masked_fill(~visible[:, None], -math.inf)
            weights, lse[rows, group] = softmax_and_lse(logits, None if sinks is None else sinks[group])
            out[rows, group] = torch.einsum("qgk,kd->qgd", weights.to(v.dtype), v[:, head])
    return (out, lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else out


def baseline(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    causal: bool = True,
) -> Any:
    """Pads the sequences to the longest one's queries and keys and calls SDPA once.

    It reads the lengths on the host to size the padding: that waits for the device, so no CUDA graph can capture it.
    """
    (tokens, heads, _), page, dim_v = q.shape, k_cache.shape[1], v_cache.shape[3]
    starts, lens = cu_seqlens_q.tolist(), context_lens.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    longest, most, live = max(lens, default=0), max(counts, default=0), starts[-1]
    out = q.new_full((tokens, heads, dim_v), poison(q.dtype)) if live < tokens else q.new_empty(tokens, heads, dim_v)
    lse = q.new_full((tokens, heads), poison(q.dtype), dtype=torch.promote_types(q.dtype, torch.float32))
    if live == 0:
        return (out, lse) if return_lse else out
    tables = block_tables[:, : -(-longest // page)]
    begins, sizes = cu_seqlens_q[:-1, None], cu_seqlens_q.diff().unsqueeze(1)  # [B, 1]
    first_keys = None if window is None else context_lens - sizes.squeeze(1) + 1 - window
    k = gather_context(k_cache, tables, context_lens, first_keys)[:, :longest].to(q.dtype)  # [B, L, Hkv, D]
    v = gather_context(v_cache, tables, context_lens, first_keys)[:, :longest].to(q.dtype)
    places = torch.arange(most, device=q.device)
    # Padding repeats a sequence's last row.
    rows = torch.minimum(begins + places, begins + sizes - 1).clamp_min_(0)  # [B, M]
    padded = q.index_select(0, rows.flatten()).unflatten(0, rows.shape)  # [B, M, Hq, D]
    fresh = counts == lens and causal and window is None
    visible = None if fresh else _visible(context_lens, sizes, places, longest, causal, window)
    attended, log_sums = padded_attention(padded, k, v, visible, scale, k_scale, v_scale, soft_cap, sinks, return_lse)
    if len(lens) == 1:
        out[:live] = attended[0]
    else:
        real = (places < sizes).flatten()  # [B*M]
        out[:live] = attended.flatten(0, 1)[real]
    if log_sums is None:
        return out
    lse[:live] = log_sums.flatten(0, 1)[(places < sizes).flatten()]
    return out, lse


def _visible(
    context_lens: torch.Tensor, sizes: torch.Tensor, places: torch.Tensor, keys: int, causal: bool, window: int | None
) -> torch.Tensor:
    """[B, M, L] bool. Rows of padding see the first key, so that none sees nothing."""
    positions = torch.arange(keys, device=places.device)
    lens = context_lens[:, None, None]  # [B, 1, 1]
    own = (context_lens[:, None] - sizes + places).unsqueeze(2)  # [B, M, 1], each query's position
    visible = positions < lens
    visible = visible & (positions <= own) if causal else visible.expand(-1, places.shape[0], -1)
    if window is not None:
        visible = visible & (positions > own - window)
    return visible | ((positions == 0) & (places >= sizes).unsqueeze(2))


def drawn_query_lens(draws: Draws, axes: Axes, context_lens: list[int]) -> list[int]:
    """At most T query tokens in all: none, one, a chunk on top of what is cached, or the whole context."""
    left, counts = int(axes["T"]), []
    if axes["lengths"] != "edges":
        return [min(length, left // len(context_lens)) for length in context_lens]
    for length, choice in zip(context_lens, draws.integers(0, 9, (len(context_lens),)).tolist(), strict=True):
        count = min(length, left, {0: 0, 1: 1, 2: 2, 3: left // 2, 4: length // 2}.get(choice, left))
        counts.append(count)
        left -= count
    return counts


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    context_lens = drawn_context_lens(draws, axes, int(axes["B"]))
    counts = drawn_query_lens(draws, axes, context_lens)
    inputs = paged_inputs(axes, draws, device, counts, int(axes["T"]), context_lens)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    cu_seqlens_q = draws.laid_out(starts).to(device)
    return {**inputs, "cu_seqlens_q": cu_seqlens_q, "return_lse": axes["return_lse"], "causal": axes["causal"]}


def _lens(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(query tokens, context) of each sequence, int64 [B]."""
    return case.inputs["cu_seqlens_q"].long().diff(), case.inputs["context_lens"].long()


def visible_pairs(case: Case) -> int:
    """How many (query, key) pairs are attended to, per query head."""
    window = int(case.axes["window"])
    total = 0
    for count, length in zip(*(lens.tolist() for lens in _lens(case)), strict=True):
        own = torch.arange(length - count, length)
        last = own + 1 if case.inputs["causal"] else torch.full_like(own, length)
        first = (own + 1 - window).clamp_min(0) if window else torch.zeros_like(own)
        total += int((last - first).sum())
    return total


def bytes_moved(case: Case) -> int:
    q, k_cache = case.inputs["q"], case.inputs["k_cache"]
    (_, heads, dim), (_, page, heads_kv, dim_v) = q.shape, case.inputs["v_cache"].shape
    counts, lens = _lens(case)
    window = int(case.axes["window"])
    first = (lens - counts + 1 - window).clamp_min(0) if window else torch.zeros_like(lens)
    first = torch.where(counts > 0, first, lens)  # of a sequence without queries, nothing is read
    cached = int((lens - first).sum()) * heads_kv * (dim + dim_v) * k_cache.element_size()
    pages = int((-(-lens // page) - first // page)[counts > 0].sum())
    queries = int(counts.sum()) * heads * ((dim + dim_v) * q.element_size() + (4 if case.inputs["return_lse"] else 0))
    per_head = sum(case.inputs[name].nbytes for name in PER_HEAD if case.inputs[name] is not None)
    return cached + queries + per_head + 4 * (pages + 2 * len(counts) + 1)


def flops(case: Case) -> int:
    _, heads, dim = case.inputs["q"].shape
    return 2 * heads * (dim + int(case.inputs["v_cache"].shape[-1])) * visible_pairs(case)


def _benchmark(sequences: int, chunk: int, context: int, page: int = 16) -> Axes:
    pages = {"S": page, "N": context // page, "P": sequences * context // page}
    return {**BENCHMARK_AXES, **pages, "B": sequences, "T": sequences * chunk, "Hq": 32, "Hkv": 8, "causal": True}


def take_sequences(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    """The batch of the picked sequences, their query rows end to end, with as many rows of padding as before."""
    q, starts = inputs["q"], inputs["cu_seqlens_q"].tolist()
    spans = [range(starts[pick], starts[pick + 1]) for pick in picks]
    rows = torch.tensor([row for span in (*spans, range(starts[-1], q.shape[0])) for row in span], dtype=torch.long)
    picked = torch.tensor(picks, dtype=torch.long, device=q.device)
    begins = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0).to(torch.int32).to(q.device)
    taken = {name: lay_out_like(inputs[name][picked], inputs[name]) for name in ("block_tables", "context_lens")}
    cu_seqlens_q = lay_out_like(begins, inputs["cu_seqlens_q"])
    return {**inputs, **taken, "q": lay_out_like(q[rows.to(q.device)], q), "cu_seqlens_q": cu_seqlens_q}


def part_of_sequence(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    first, last = inputs["cu_seqlens_q"][member : member + 2].tolist()
    return {name: result[first:last] for name, result in results.items()}


CONTRACT = Contract(
    name="paged_prefill",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("B", 0, 2**31 - 1, (1, 2, 3), "sequences", batch=True, wide=(1,)),
        Int(
            "T",
            0,
            2**31 - 1,
            (1, 2, 7, 33, 70, 110),
            "query tokens, padding included",
            batch=True,
            wide=(16,),
            classes=(512, 4096),
        ),
        *SIZE_AXES,
        *OPTION_AXES,
        Choice("causal", (True, False), "a query sees no key after itself"),
    ),
    constraints=CONSTRAINTS,
    corners={
        **CORNERS,
        # Four thousand pages for a variant that takes none of one token: a window leaves the last of them to compute.
        "far_pages": {
            **{"lengths": "full", "B": 1, "S": 16, "N": 4100, "P": 4100, "Hkv": 1, "Hq": 2, "D": 16, "Dv": 16},
            **{"window": 40, "values": "ordinary"},
        },
    },
    arguments={
        "q": Tensor("T Hq D", "activation"),
        "k_cache": Tensor("P S Hkv D", "kv", read_wide=True),
        "v_cache": Tensor("P S Hkv Dv", "kv", read_wide=True),
        "block_tables": Tensor("B N", "int32"),
        "cu_seqlens_q": Tensor("B+1", "int32"),
        "context_lens": Tensor("B", "int32"),
        **OPTION_ARGUMENTS,
        "causal": Scalar(bool, axis=True),
    },
    outputs={"out": Output("T Hq Dv", "activation"), "lse": Output("T Hq", "float32", when="return_lse")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="packed_gqa",
    benchmarks={
        f"B={sequences},chunk={chunk},context={context}": _benchmark(sequences, chunk, context)
        for sequences, chunk, context in (
            (1, 512, 512),
            (8, 512, 512),
            (1, 4096, 4096),
            (1, 512, 16384),
        )
    }
    | {  # as an engine has them from sm_90 on
        f"B={sequences},chunk={chunk},context={context},S=64": _benchmark(sequences, chunk, context, page=64)
        for sequences, chunk, context in ((8, 512, 512), (1, 512, 16384), (1, 16384, 16384))
    }
    | {"B=1,chunk=16384,context=16384,S=128": _benchmark(1, 16384, 16384, page=128)}
    | {"B=1,chunk=16384,context=16384": _benchmark(1, 16384, 16384)},
    inspected={"large_pages": {"S": 128}, **INSPECTED},
    batching=Batching(count_sequences, take_sequences, part_of_sequence, loosen_bounds),
    work="prefill",
)
