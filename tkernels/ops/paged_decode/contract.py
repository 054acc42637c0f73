"""paged_decode: attention of one query token per sequence over keys and values in pages (Kwon et al., 2023)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, lay_out_like
from tkernels.contract import Axes, Case, Contract, Int, Output, Tensor
from tkernels.inputs import Draws
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
    live_rows,
    loosen_bounds,
    padded_attention,
    paged_inputs,
    select_pages,
    zero_rows,
)
from tkernels.ops.softmax import LOG2_E, capped, softmax_and_lse


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
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
) -> Any:
    """softmax(scale * q . k) v of each sequence's newest token over its own cached tokens, itself included.

    Args:
        q: [B, Hq, D], any float dtype. Hq is a multiple of Hkv; query heads h*G .. h*G+G-1 share KV head h.
        k_cache: [P, S, Hkv, D], as q or fp8 (e4m3fn); S, the page size, is a power of two.
        v_cache: [P, S, Hkv, Dv], as k_cache.
        block_tables: [B, N] int32; entry i is the page of tokens i*S .. i*S+S-1. Those past ceil(context / S), and
            those wholly before the window, (context - window) // S of them, are undefined and never dereferenced.
        context_lens: [B] int32, tokens in the cache, this step's included, at most N*S. 0 gives zeros.
        scale: Multiplies the logits.
        max_context_len: Upper bound of context_lens that the host knows, by default N*S. Of contexts beyond it the
            result is undefined, and of a variant that counts its programs' arrivals that of later calls too.
        window: A query sees the last `window` keys, itself included, at least 1; None is all.
        k_scale: [Hkv] float32, the real keys are the cached ones times it.
        v_scale: [Hkv] float32, the same for values.
        soft_cap: Logits become soft_cap * tanh(logit / soft_cap) before any is masked; positive. None leaves them.
        sinks: [Hq] float32, natural: one more logit for each query head, neither scaled nor capped, which has a weight
            but no value. -inf is none. Of +inf or NaN, which no kernel checks, the head's results are undefined.
        return_lse: Return the log-sum-exp of the logits too, that of a sink included.

    Returns:
        out [B, Hq, Dv], as q; with return_lse also lse [B, Hq] float32 (float64 of float64), natural log: of context 0
        the sink, or -inf.

    Source: soft caps are Gemma 2's (Gemma Team, 2024), sinks gpt-oss's (OpenAI, 2025).
    """
    (sequences, heads, dim), (_, page, heads_kv, dim_v) = q.shape, v_cache.shape
    out = q.new_zeros(sequences, heads, dim_v)
    lse = q.new_full((sequences, heads), -math.inf)
    if sinks is not None:
        lse[:] = sinks
    for sequence, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        first = max(length - window, 0) if window else 0
        pages = block_tables[sequence, first // page : -(-length // page)]
        seen = slice(first % page, length - first // page * page)
        k = select_pages(k_cache, pages, q.dtype).flatten(0, 1)[seen]  # [keys, Hkv, D]
        v = select_pages(v_cache, pages, q.dtype).flatten(0, 1)[seen]
        k = k if k_scale is None else (k * k_scale[:, None]).to(k.dtype)
        v = v if v_scale is None else (v * v_scale[:, None]).to(v.dtype)
        queries = (q[sequence] * scale).view(heads_kv, -1, dim)  # [Hkv, G, D]
        logits = capped(torch.einsum("hgd,khd->hgk", queries, k), soft_cap).flatten(0, 1)  # [Hq, keys]
        weights, lse[sequence] = softmax_and_lse(logits, sinks)
        grouped = weights.to(v.dtype).unflatten(0, (heads_kv, -1))
        out[sequence] = torch.einsum("hgk,khd->hgd", grouped, v).reshape(heads, dim_v)
    return (out, lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else out


def baseline(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
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
) -> Any:
    """Gathers the pages of all sequences, padded to the longest possible context; attends to all at once, no sync."""
    page, longest = k_cache.shape[1], block_tables.shape[1] * k_cache.shape[1]
    if max_context_len is not None:
        longest = min(longest, max(1, max_context_len))
    block_tables = block_tables[:, : -(-longest // page)]
    if q.dtype.itemsize > 2 and not return_lse and soft_cap is None and sinks is None:
        return _exact_decode(q, k_cache, v_cache, block_tables, context_lens, longest, scale, window, k_scale, v_scale)
    first_keys = None if window is None else context_lens - window
    k = gather_context(k_cache, block_tables, context_lens, first_keys).to(q.dtype)  # [B, L, Hkv, D]
    v = gather_context(v_cache, block_tables, context_lens, first_keys).to(q.dtype)
    positions = torch.arange(k.shape[1], device=q.device)
    # A context of 0 sees its first row, which was gathered as zeros, so that its result is zero and not NaN.
    visible = positions < context_lens[:, None].clamp_min(1)
    if window is not None:
        visible &= positions >= context_lens[:, None] - window
    # [B, 1, Hq, Dv]
    out, lse = padded_attention(
        q.unsqueeze(1), k, v, visible.unsqueeze(1), scale, k_scale, v_scale, soft_cap, sinks, return_lse
    )
    if lse is None:
        return out.squeeze(1)
    of_none = lse.new_full((), -math.inf) if sinks is None else sinks
    return out.squeeze(1), torch.where((context_lens == 0)[:, None], of_none, lse.squeeze(1))


def _exact_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """fp32 and fp64 without a log-sum-exp, a cap or sinks: what a CPU engine runs in every layer of every step, so in
    few torch calls.

    K is let go before V is gathered, so that V takes its memory, which the caches of the CPU still hold: over all
    steps of 32 sequences that is 18.5 ms against 19.7 on one core.
    """
    (batch, heads, dim), (_, page, heads_kv, dim_v) = q.shape, v_cache.shape
    keys, group = block_tables.shape[1] * page, heads // heads_kv
    first_keys = None if window is None else context_lens - window
    live = live_rows(context_lens, block_tables.shape[1], page, first_keys)  # [B, N*S]
    pages = (block_tables * live[:, ::page]).flatten()  # whatever a dead entry holds, it becomes page 0
    hidden = ~live
    if first_keys is not None:
        hidden |= torch.arange(keys, device=q.device) < first_keys.unsqueeze(1)
    scaled = q if k_scale is None else (q * k_scale.repeat_interleave(group).unsqueeze(-1)).to(q.dtype)
    queries = (scaled * (scale * LOG2_E)).view(batch, heads_kv, group, dim).unbind(1)
    # One product per KV head, whose keys are strided: a product takes them as they are, a reshape would copy them.
    k = select_pages(k_cache, pages, q.dtype).view(batch, keys, heads_kv, dim)[:, :longest].transpose(1, 3).unbind(2)
    # [B, G, D] @ [B, D, L] -> [B, Hq, L]
    logits = torch.cat([torch.bmm(queries_h, k_h) for queries_h, k_h in zip(queries, k, strict=True)], dim=1)
    del k
    logits.masked_fill_(hidden[:, :longest].unsqueeze(1), -math.inf)
    # Of a context of 0 all logits are -inf: the finite bounds make its weights 0 / tiny.
    finite = torch.finfo(q.dtype)
    weights = logits.sub_(logits.amax(dim=-1, keepdim=True).clamp_min_(finite.min)).exp2_()
    weights.div_(weights.sum(dim=-1, keepdim=True).clamp_min_(finite.tiny))
    v = select_pages(v_cache, pages, q.dtype).view(batch, keys, heads_kv, dim_v)
    zero_rows(v, live)  # their weights are 0, but what they hold may be NaN; a key's NaN was masked with its logit
    grouped = weights.view(batch, heads_kv, group, longest).unbind(1)
    # [B, G, L] @ [B, L, Dv] -> [B, Hq, Dv]
    out = torch.cat(
        [torch.bmm(weights_h, v_h) for weights_h, v_h in zip(grouped, v[:, :longest].unbind(2), strict=True)], dim=1
    )
    return out if v_scale is None else (out * v_scale.repeat_interleave(group).unsqueeze(-1)).to(out.dtype)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    sequences = int(axes["B"])
    lens = drawn_context_lens(draws, axes, sequences)
    inputs = paged_inputs(axes, draws, device, [1] * sequences, sequences, lens)
    return {**inputs, "return_lse": axes["return_lse"]}


def visible_keys(case: Case) -> int:
    """The (sequence, key) pairs that are attended to, which are also the cache rows read per KV head."""
    window = int(case.axes["window"])
    lens = case.inputs["context_lens"].long()
    return int((lens.clamp_max(window) if window else lens).sum())


def bytes_moved(case: Case) -> int:
    q, k_cache, v_cache = (case.inputs[name] for name in ("q", "k_cache", "v_cache"))
    (sequences, heads, dim), (_, page, heads_kv, dim_v) = q.shape, v_cache.shape
    pages = (case.inputs["context_lens"].long() + page - 1) // page
    window = int(case.axes["window"])
    if window:
        pages = pages - (case.inputs["context_lens"].long() - window).clamp_min(0) // page
    cached = visible_keys(case) * heads_kv * (dim + dim_v) * k_cache.element_size()
    queries = sequences * heads * ((dim + dim_v) * q.element_size() + (4 if case.inputs["return_lse"] else 0))
    per_head = sum(case.inputs[name].nbytes for name in PER_HEAD if case.inputs[name] is not None)
    return cached + queries + per_head + 4 * (int(pages.sum()) + sequences)


def flops(case: Case) -> int:
    _, heads, dim = case.inputs["q"].shape
    return 2 * heads * (dim + int(case.inputs["v_cache"].shape[-1])) * visible_keys(case)


def _benchmark(sequences: int, context: int, kv: str = "bfloat16", page: int = 16) -> Axes:
    sizes = {"B": sequences, "S": page, "N": context // page, "P": sequences * context // page, "Hq": 32, "Hkv": 8}
    scaled = kv == "float8_e4m3fn"
    return {**BENCHMARK_AXES, **sizes, "kv": kv, "k_scale": scaled, "v_scale": scaled}


def take_sequences(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    """The batch of the picked sequences. One that comes twice shares its pages with itself."""
    rows = torch.tensor(picks, dtype=torch.long, device=inputs["q"].device)
    taken = {name: lay_out_like(inputs[name][rows], inputs[name]) for name in ("q", "block_tables", "context_lens")}
    return {**inputs, **taken}


def part_of_sequence(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    return {name: result[member] for name, result in results.items()}


CONTRACT = Contract(
    name="paged_decode",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("B", 0, 2**31 - 1, (1, 2, 3), "sequences", batch=True, wide=(1,), classes=(1, 16)),
        *SIZE_AXES,
        *OPTION_AXES,
    ),
    constraints=CONSTRAINTS,
    corners=CORNERS,
    arguments={
        "q": Tensor("B Hq D", "activation"),
        "k_cache": Tensor("P S Hkv D", "kv", read_wide=True),
        "v_cache": Tensor("P S Hkv Dv", "kv", read_wide=True),
        "block_tables": Tensor("B N", "int32"),
        "context_lens": Tensor("B", "int32"),
        **OPTION_ARGUMENTS,
    },
    outputs={"out": Output("B Hq Dv", "activation"), "lse": Output("B Hq", "float32", when="return_lse")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    # One program for each sequence and KV head is 8 programs for 132 multiprocessors where one sequence of 8 KV heads
    # decodes, and less than three waves below 50. Where they do fill the device, parts are 1.6% more bytes.
    default="last_arriver",
    benchmarks={
        f"B={sequences},context={context}": _benchmark(sequences, context)
        for sequences, context in ((1, 1024), (1, 65536), (8, 2048), (8, 32768), (32, 4096), (64, 1024))
    }
    | {  # as an engine has them from sm_90 on
        f"B={sequences},context={context},S=64": _benchmark(sequences, context, page=64)
        for sequences, context in ((1, 1024), (1, 65536), (64, 8192))
    }
    | {"B=64,context=8192,kv=fp8": _benchmark(64, 8192, "float8_e4m3fn")}
    | {"B=64,context=8192": _benchmark(64, 8192)},
    inspected=INSPECTED,
    batching=Batching(count_sequences, take_sequences, part_of_sequence, loosen_bounds),
    work="decode",
)
