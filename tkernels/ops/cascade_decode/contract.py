"""cascade_decode: attention of one query token per sequence over a paged cache, where neighbouring sequences may share
their first pages: what they share is read once for all of them (cascade inference; Ye et al., 2024).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, lay_out_like
from tkernels.contract import Axes, Case, Constraint, Contract, Int, Output, Scalar, Tensor
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
    as_bits,
    count_sequences,
    drawn_context_lens,
    loosen_bounds,
    paged_inputs,
)
from tkernels.ops.paged_decode import contract as paged_decode


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    group_starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None = None,
    max_prefix_len: int | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """paged_decode of the whole contexts: pages that are shared are the same pages, so groups change nothing but cost.

    Args:
        q: [B, Hq, D], any float dtype, the sequences of a group side by side. Hq is a multiple of Hkv; query heads
            h*G .. h*G+G-1 share KV head h.
        k_cache: [P, S, Hkv, D], as q or fp8 (e4m3fn); S, the page size, is a power of two.
        v_cache: [P, S, Hkv, Dv], as k_cache.
        block_tables: [B, N] int32; entry i is the page of tokens i*S .. i*S+S-1. Those past ceil(context / S), and
            those wholly before the window, (context - window) // S of them, are undefined and never dereferenced.
        context_lens: [B] int32, tokens in the cache, this step's included, at most N*S. 0 gives zeros.
        group_starts: [G+1] int32, ascending, from 0 to at most B: sequences group_starts[g] .. group_starts[g+1]-1 are
            group g. A group may have one sequence, or none: so a batch with fewer groups than G is filled up by
            repeating the last entry. Sequences from group_starts[G] on are in no group, and share nothing.
        prefix_lens: [G] int32, the tokens that all sequences of a group share: a multiple of S, and at most the context
            of each of them, so that a sequence may share all that it has. In the first prefix / S columns of the tables
            their entries are equal, as far as they are defined. 0 shares nothing; undefined for a group without
            sequences.
        scale: Multiplies the logits.
        max_context_len: Upper bound of context_lens that the host knows, by default N*S. Contexts beyond it are
            undefined.
        max_prefix_len: The same of prefix_lens, by default max_context_len.
        window: A query sees the last `window` keys, itself included, at least 1; None is all. It may begin inside the
            prefix, of each sequence elsewhere.
        k_scale: [Hkv] float32, positive; the real keys are the cached ones times it.
        v_scale: [Hkv] float32, the same for values.
        soft_cap, sinks: See `paged_decode`.
        return_lse: Return the log-sum-exp of the logits too, that of a sink included.

    What the integers say is not checked, as that would wait for the device: of groups that overlap, or whose entries
    differ within the prefix, a prefix of part of a page, or one beyond a context or a bound, the result is undefined,
    and of a variant that counts its programs' arrivals that of later calls too.

    Returns:
        out [B, Hq, Dv], as q; with return_lse also lse [B, Hq] float32 (float64 of float64), natural log: of context 0
        the sink, or -inf.
    """
    return paged_decode.reference(
        q, k_cache, v_cache, block_tables, context_lens, scale, max_context_len=max_context_len, window=window,
        k_scale=k_scale, v_scale=v_scale, soft_cap=soft_cap, sinks=sinks, return_lse=return_lse,
    )  # fmt: skip


def baseline(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    group_starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None = None,
    max_prefix_len: int | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Every sequence's own keys, shared or not, as paged_decode's."""
    return paged_decode.baseline(
        q, k_cache, v_cache, block_tables, context_lens, scale, max_context_len=max_context_len, window=window,
        k_scale=k_scale, v_scale=v_scale, soft_cap=soft_cap, sinks=sinks, return_lse=return_lse,
    )  # fmt: skip


def drawn_groups(draws: Draws, axes: Axes) -> tuple[list[int], list[int]]:
    """(group_starts, pages of each group's prefix): the batch cut anywhere, so that groups are empty and sequences in
    none, with prefixes of nothing up to `shared` pages; cut evenly, and all of `shared`, where contexts are full.
    """
    sequences, groups, most = int(axes["B"]), int(axes["G"]), int(axes["shared"])
    if axes["lengths"] == "full":
        return [sequences * g // max(groups, 1) for g in range(groups + 1)], [most] * groups
    cuts = sorted(draws.integers(0, sequences, (groups,)).tolist())
    if int(draws.integers(0, 1, ())):  # else those behind the last cut are in no group
        cuts = [*cuts[:-1], sequences] if groups else []
    fewer = draws.integers(0, 1, (groups,)) * (most - draws.integers(0, most, (groups,)))
    return [0, *cuts], (most - fewer).tolist()


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    sequences, page, window = int(axes["B"]), int(axes["S"]), int(axes["window"])
    starts, prefixes = drawn_groups(draws, axes)
    lens = drawn_context_lens(draws, axes, sequences)
    for group, pages in enumerate(prefixes):  # contexts shorter than the prefix become all of it
        for sequence in range(starts[group], starts[group + 1]):
            lens[sequence] = max(lens[sequence], pages * page)
    inputs = paged_inputs(axes, draws, device, [1] * sequences, sequences, lens)
    tables = inputs["block_tables"]
    for group, pages in enumerate(prefixes):
        members = range(starts[group], starts[group + 1])
        longest_ago = min(members, key=lambda sequence: lens[sequence], default=0)  # whose window begins first
        for sequence in members:
            passed = max(lens[sequence] - window, 0) // page if window else 0
            if sequence != longest_ago and passed < pages:
                unused = tables[sequence, passed:pages].clone()
                tables[sequence, passed:pages] = tables[longest_ago, passed:pages]
                for cache in (inputs["k_cache"], inputs["v_cache"]):  # nobody's by now
                    nobodys = torch.full((), poison(cache.dtype), dtype=cache.dtype, device=device)
                    as_bits(cache)[unused.long()] = as_bits(nobodys)
        if not members:
            prefixes[group] = int(poison(torch.int32)) // page
    most = max((pages * page for group, pages in enumerate(prefixes) if starts[group] < starts[group + 1]), default=0)
    bound = {"none": None, "exact": most, "loose": most + 3 * page + 1}[str(axes["bound"])]
    groups = {
        "group_starts": torch.tensor(starts, dtype=torch.int32),
        "prefix_lens": torch.tensor([pages * page for pages in prefixes], dtype=torch.int32),
    }
    inputs |= {name: draws.laid_out(tensor).to(device) for name, tensor in groups.items()}
    return {**inputs, "max_prefix_len": bound, "return_lse": axes["return_lse"]}


def _spans(case: Case) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """((first, end) of the keys that each group reads of its prefix, the same that each sequence reads alone), those of
    groups and sequences that read any.
    """
    lens, starts = case.inputs["context_lens"].tolist(), case.inputs["group_starts"].tolist()
    window = int(case.axes["window"])
    first = [max(length - window, 0) if window else 0 for length in lens]
    shared, alone = [], {sequence: (first[sequence], length) for sequence, length in enumerate(lens)}
    for begin, end, prefix in zip(starts, starts[1:], case.inputs["prefix_lens"].tolist(), strict=False):
        if begin < end:
            shared.append((min(first[begin:end]), prefix))
            alone |= {sequence: (max(first[sequence], prefix), lens[sequence]) for sequence in range(begin, end)}
    return [span for span in shared if span[0] < span[1]], [span for span in alone.values() if span[0] < span[1]]


def bytes_moved(case: Case) -> int:
    """Keys, values and table entries of a prefix once for each group."""
    q, k_cache = case.inputs["q"], case.inputs["k_cache"]
    (sequences, heads, dim), (_, page, heads_kv, dim_v) = q.shape, case.inputs["v_cache"].shape
    spans = [span for spans in _spans(case) for span in spans]
    cached = sum(end - first for first, end in spans) * heads_kv * (dim + dim_v) * k_cache.element_size()
    pages = sum(-(-end // page) - first // page for first, end in spans)
    queries = sequences * heads * ((dim + dim_v) * q.element_size() + (4 if case.inputs["return_lse"] else 0))
    per_head = sum(case.inputs[name].nbytes for name in PER_HEAD if case.inputs[name] is not None)
    groups = 2 * len(case.inputs["prefix_lens"]) + 1
    return int(cached + queries + per_head + 4 * (pages + sequences + groups))


def _benchmark(sequences: int, prefix: int, own: int, page: int = 16) -> Axes:
    """One group of all sequences, each with `own` tokens after the prefix."""
    shared, width = prefix // page, (prefix + own) // page
    sizes = {"B": sequences, "G": 1, "shared": shared, "S": page, "N": width, "P": sequences * width}
    return {**BENCHMARK_AXES, **sizes, "Hq": 32, "Hkv": 8}


def take_sequences(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    """The batch of the picked sequences. Neighbours from one group stay one; one that comes twice is beside itself."""
    starts, prefixes = inputs["group_starts"].tolist(), inputs["prefix_lens"].tolist()
    group_of = [next((g for g in range(len(prefixes)) if starts[g] <= p < starts[g + 1]), None) for p in picks]
    begins, shared = [0], []
    for place, group in enumerate(group_of):
        if place == 0 or group is None or group != group_of[place - 1]:
            begins += [place] if place else []
            shared.append(0 if group is None else prefixes[group])
    begins += [len(picks)] if picks else []
    device = inputs["q"].device
    groups = {"group_starts": begins, "prefix_lens": shared}
    taken = {
        name: lay_out_like(torch.tensor(values, dtype=torch.int32, device=device), inputs[name])
        for name, values in groups.items()
    }
    return {**paged_decode.take_sequences(inputs, picks), **taken}


def loosen(inputs: Inputs) -> dict[str, Any]:
    """Wider tables and looser bounds, and two groups more, without sequences."""
    loose = loosen_bounds(inputs)
    starts, prefixes = inputs["group_starts"], inputs["prefix_lens"]
    more = {
        "group_starts": torch.cat((starts, starts[-1:].expand(2))),
        "prefix_lens": torch.cat((prefixes, torch.full_like(starts[:1], int(poison(starts.dtype))).expand(2))),
    }
    loose |= {name: lay_out_like(values, inputs[name]) for name, values in more.items()}
    if inputs["max_prefix_len"] is not None:
        loose["max_prefix_len"] = loose["max_context_len"]
    return loose


def _shared_corner(corner: Axes) -> Axes:
    """A corner of paged attention in two sequences at least that share half of their pages; none where contexts are to
    be empty.
    """
    sequences, width = max(2, int(corner["B"])), int(corner["N"])
    shared = 0 if corner.get("lengths") == "gaps" else width // 2
    return {**corner, "B": sequences, "P": max(int(corner["P"]), sequences * width), "G": 1, "shared": shared}


_OPTIONS = list(OPTION_ARGUMENTS.items())
_POOL = next(axis for axis in SIZE_AXES if axis.name == "P")
assert isinstance(_POOL, Int)

CONTRACT = Contract(
    name="cascade_decode",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("B", 0, 2**31 - 1, (1, 2, 3, 5), "sequences", batch=True, wide=(4,), classes=(16,)),
        *(
            # Five sequences fit beside the widest tables that are drawn, and four beside the widest of a wide case.
            replace(axis, draws=(*_POOL.draws, 64, 650), wide=(*_POOL.wide, 4400)) if axis is _POOL else axis
            for axis in SIZE_AXES
        ),
        Int("G", 0, 2**31 - 1, (1, 0, 2, 3), "groups", batch=True, wide=(1, 2)),
        Int("shared", 0, 2**31 - 1, (1, 0, 2, 5, 9, 40, 130), "pages of the longest prefix", batch=True, wide=(9, 63)),
        *OPTION_AXES,
    ),
    constraints=(*CONSTRAINTS, Constraint("shared <= N")),
    corners={
        **{name: _shared_corner(corner) for name, corner in CORNERS.items()},
        # The first key that a window sees is the first behind the prefix, whose pages nobody need have any more.
        "window_after_prefix": {
            **{"lengths": "full", "B": 2, "S": 8, "N": 5, "P": 10, "G": 1, "shared": 2, "window": 24, "Dv": 64}
        },
    },
    arguments={
        "q": Tensor("B Hq D", "activation"),
        "k_cache": Tensor("P S Hkv D", "kv", read_wide=True),
        "v_cache": Tensor("P S Hkv Dv", "kv", read_wide=True),
        "block_tables": Tensor("B N", "int32"),
        "context_lens": Tensor("B", "int32"),
        "group_starts": Tensor("G+1", "int32"),
        "prefix_lens": Tensor("G", "int32"),
        **dict(_OPTIONS[:2]),  # scale, max_context_len
        "max_prefix_len": Scalar(int, optional=True, low=0),
        **dict(_OPTIONS[2:]),
    },
    outputs={"out": Output("B Hq Dv", "activation"), "lse": Output("B Hq", "float32", when="return_lse")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=paged_decode.flops,
    default="auto",
    benchmarks={
        f"B={sequences},prefix={prefix},own={own}": _benchmark(sequences, prefix, own)
        for sequences, prefix, own in ((8, 1024, 256), (256, 512, 256), (32, 4096, 256))
    },
    inspected=INSPECTED,
    batching=Batching(count_sequences, take_sequences, paged_decode.part_of_sequence, loosen),
    work="decode",
)
