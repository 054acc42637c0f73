"""kv_scatter: this step's keys and values go to their slots in the paged cache."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, Int, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of, poison, poisoned_views
from tkernels.ops.paged_cache import KV_DTYPE, as_bits, stored


def reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes row t of k and v to slot slots[t] of the caches, divided by the heads' scales where there are any.

    Args:
        k: [T, Hkv, D], any float dtype, free token and head strides (a view of a fused QKV row).
        v: [T, Hkv, Dv], as k.
        k_cache: [P, S, Hkv, D] pages of S slots, dtype of k or fp8 (e4m3fn: rounded to nearest even, and what is larger
            than 448 becomes 448), free page, slot and head strides (head-major). Written.
        v_cache: [P, S, Hkv, Dv], as k_cache. Written.
        slots: [T] int64: page * S + offset, or -1 for a row to skip (padding). The others are distinct and less than
            P * S. Not checked: that would wait for the device.
        k_scale, v_scale: [Hkv] float32: what a stored value is to be multiplied by when it is read.

    Source: the paged cache of Kwon et al., PagedAttention, 2023.
    """
    kept = slots >= 0
    page_size = k_cache.shape[1]
    pages, offsets = slots[kept] // page_size, slots[kept] % page_size
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values = rows[kept] if scale is None else rows[kept] / scale.unsqueeze(-1)  # [kept, Hkv, D]
        as_bits(cache)[pages, offsets] = as_bits(stored(values, cache.dtype))


def baseline(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    if slots.is_cuda:
        scatter_without_sync(k, v, k_cache, v_cache, slots, k_scale, v_scale)
        return
    if slots.numel() and int(slots.min()) < 0:
        kept = slots >= 0
        k, v, slots = k[kept], v[kept], slots[kept]
    page_size = k_cache.shape[1]
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values = as_bits(stored(rows if scale is None else rows / scale.unsqueeze(-1), cache.dtype))
        cache = as_bits(cache)
        if cache.stride(0) == page_size * cache.stride(1):  # slots lie evenly: 3 us, where two indices take 5
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, values)
        else:
            cache[slots // page_size, slots % page_size] = values


def scatter_without_sync(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """The baseline where the host must not wait for the number of kept rows, so that a CUDA graph can capture it.

    A row to skip repeats the first kept row, to that row's slot: a second write of the same bits. Where no row is kept,
    slot 0 gets what it holds.
    """
    if slots.numel() == 0:
        return
    kept = slots >= 0
    source = torch.where(kept, torch.arange(slots.numel(), device=slots.device), kept.int().argmax())  # [T]
    targets = slots[source].clamp(min=0)
    any_kept = kept.any().view(1, 1, 1)
    pages, offsets = targets // k_cache.shape[1], targets % k_cache.shape[1]
    for rows, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        values = rows[source] if scale is None else rows[source] / scale.unsqueeze(-1)
        values, cache = as_bits(stored(values, cache.dtype)), as_bits(cache)
        cache[pages, offsets] = torch.where(any_kept, values, cache[pages, offsets])


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, heads = int(axes["T"]), int(axes["Hkv"])
    dtype, kv_dtype = dtype_of(axes["activation"]), dtype_of(axes["kv"])
    pages, page_size = int(axes["P"]), int(axes["S"])
    dims = {"k": int(axes["D"]), "v": int(axes["Dv"])}
    k, v = (draws.normal((tokens, heads, dim), dtype, axes["values"]) for dim in dims.values())
    if axes["layout"] == "fused":  # the engine's: keys and values are parts of one row
        k, v = poisoned_views([k, v], dim=-1)
    else:
        k, v = (draws.laid_out(x, axes["layout"]) for x in (k, v))
    slots = torch.full((tokens,), -1)
    count = 0 if axes["skipped"] == "all" else min(tokens, pages * page_size)
    if axes["skipped"] == "some" and count:
        count -= int(draws.integers(0, count - 1, ()))
    rows = draws.permutation(tokens)[:count]
    slots[rows] = draws.permutation(pages * page_size)[:count]
    caches = [
        torch.full((pages, page_size, heads, dim), poison(kv_dtype), dtype=kv_dtype, device=device)
        for dim in dims.values()
    ]
    k_cache, v_cache = _laid_out_caches(caches, str(axes["cache_layout"]))
    scales: dict[str, torch.Tensor | None] = {"k_scale": None, "v_scale": None}
    for name in scales:
        if axes[name]:
            scales[name] = draws.laid_out(draws.normal((heads,), torch.float32).abs() + 0.5)
    inputs = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    return {**inputs, "slots": draws.laid_out(slots.to(device)), **scales}


def _laid_out_caches(caches: list[torch.Tensor], layout: str) -> list[torch.Tensor]:
    """The caches [P, S, Hkv, D] in poisoned storage: side by side, head by head, or each for itself."""
    if layout == "joint":
        return poisoned_views(caches, dim=-1)
    if layout == "head_major":
        return [poisoned_views([cache.transpose(1, 2)], dim=0)[0].transpose(1, 2) for cache in caches]
    return [poisoned_views([cache], dim=0)[0] for cache in caches]


def bytes_moved(case: Case) -> int:
    k, v, slots = case.inputs["k"], case.inputs["v"], case.inputs["slots"]
    kept = int((slots >= 0).sum())
    moved = k.element_size() + case.inputs["k_cache"].element_size()  # read and written
    rows = kept * k.shape[1] * (k.shape[2] + v.shape[2]) * moved
    scales = sum(4 * k.shape[1] for name in ("k_scale", "v_scale") if case.inputs[name] is not None)
    return int(rows + 8 * slots.numel() + scales)


def flops(case: Case) -> int:
    k, v, slots = case.inputs["k"], case.inputs["v"], case.inputs["slots"]
    dims = sum(x.shape[2] for x, name in ((k, "k_scale"), (v, "v_scale")) if case.inputs[name] is not None)
    return int((slots >= 0).sum()) * int(k.shape[1]) * int(dims)


CONTRACT = Contract(
    name="kv_scatter",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 4), "tokens", batch=True, wide=(20,)),
        Int("Hkv", 1, 1024, (1, 2, 5, 8), "KV heads"),
        Int("D", 1, 1024, (1, 16, 31, 64, 80, 128), "key head dim"),
        Int("Dv", 1, 1024, (1, 16, 31, 64, 96, 128), "value head dim"),
        Int("P", 1, 2**31 - 1, (1, 2, 3), "pages in the cache", wide=(130,)),
        Int("S", 1, 65536, (1, 2, 3, 16), "slots in a page"),
        dtype_axis("activation"),
        dtype_axis("kv", "float8_e4m3fn"),
        Choice("k_scale", (False, True)),
        Choice("v_scale", (False, True)),
        Choice("layout", (*LAYOUTS, "fused"), "of k and v"),
        Choice("cache_layout", ("token_major", "head_major", "joint")),
        Choice("skipped", ("none", "some", "all"), "rows whose slot is -1", wide=("none", "some"), hiding=("all",)),
        Choice("values", KINDS),
    ),
    constraints=(KV_DTYPE,),
    arguments={
        "k": Tensor("T Hkv D", "activation"),
        "v": Tensor("T Hkv Dv", "activation"),
        "k_cache": Tensor("P S Hkv D", "kv"),
        "v_cache": Tensor("P S Hkv Dv", "kv"),
        "slots": Tensor("T", "int64", indexes="P S"),
        "k_scale": Tensor("Hkv", "float32", optional=True),
        "v_scale": Tensor("Hkv", "float32", optional=True),
    },
    writes=("k_cache", "v_cache"),
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="token_per_program",
    benchmarks={
        f"T={tokens},Hkv=8,D=128,S=16": {
            "T": tokens,
            "Hkv": 8,
            "D": 128,
            "Dv": 128,
            "P": 1024,
            "S": 16,
            "activation": "bfloat16",
            "kv": "bfloat16",
            "k_scale": False,
            "v_scale": False,
            "layout": "fused",
            "cache_layout": "token_major",
            "skipped": "none",
        }
        for tokens in (1, 64, 4096)
    },
    corners={
        # Values of either sign that an fp8 cache has to saturate, divided or not, and enough of them.
        f"saturated,{scaled}": {
            "T": 20,
            "Hkv": 16,
            "D": 128,
            "Dv": 128,
            "P": 2,
            "S": 16,
            "kv": "float8_e4m3fn",
            "k_scale": scaled == "k_scale",
            "v_scale": scaled == "v_scale",
            "skipped": "none",
            "values": "huge",
        }
        for scaled in ("k_scale", "v_scale")
    },
    batching=row_batching("k", "v", caches=("k_cache", "v_cache"), slots="slots"),
)
