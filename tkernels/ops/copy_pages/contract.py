"""copy_pages: pages of the paged cache are copied to other pages, in every layer's keys and values at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, lay_out_like
from tkernels.contract import Axes, Case, Choice, Contract, Int, Tensor, dtype_axis
from tkernels.inputs import KINDS, Draws, dtype_of, poison, poisoned_views
from tkernels.ops.paged_cache import as_bits


def reference(caches: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Writes page src[i] of each cache to its page dst[i].

    Args:
        caches: [C, P, S, Hkv, D] C caches (each layer's keys, each layer's values) of P pages of S slots, any float
            dtype, free strides but the last. Written.
        src: [pairs] int32, pages that are read, or -1 for a pair to skip (padding). One page may be read many times.
        dst: [pairs] int32, pages that are written, or -1 for a pair to skip. The others are distinct, and none is a
            src, so the order does not matter. Neither this nor their range is checked: that would wait for the device.

    Source: the copy-on-write of Kwon et al., PagedAttention, 2023.
    """
    kept = (src >= 0) & (dst >= 0)
    pages = as_bits(caches)
    pages[:, dst[kept].long()] = pages[:, src[kept].long()]


def baseline(caches: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    if src.is_cuda:
        copy_without_sync(caches, src, dst)
        return
    kept = (src >= 0) & (dst >= 0)
    if not bool(kept.all()):
        src, dst = src[kept], dst[kept]
    pages = as_bits(caches)
    pages.index_copy_(1, dst.long(), pages.index_select(1, src))


def copy_without_sync(caches: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """The baseline where the host must not wait for the number of kept pairs, so that a CUDA graph can capture it.

    A pair to skip repeats the first kept one: a second write of the same bits. Where none is kept, page 0 gets what it
    holds.
    """
    if src.numel() == 0:
        return
    kept = (src >= 0) & (dst >= 0)
    pair = torch.where(kept, torch.arange(kept.numel(), device=kept.device), kept.int().argmax())  # [pairs]
    source, target = (torch.where(kept.any(), pages[pair], 0) for pages in (src, dst))
    pages = as_bits(caches)
    pages.index_copy_(1, target.long(), pages.index_select(1, source))


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    pairs, count, pages = int(axes["pairs"]), int(axes["C"]), int(axes["P"])
    shape = (count, pages, int(axes["S"]), int(axes["Hkv"]), int(axes["D"]))
    dtype = dtype_of(axes["kv"])
    wanted = 0 if axes["skipped"] == "all" else min(pairs, pages - 1)
    if axes["skipped"] == "some" and wanted:
        wanted -= int(draws.integers(0, wanted, ()))
    order = draws.permutation(pages)
    targets, readable = order[:wanted], order[wanted:]
    sources = readable[draws.integers(0, len(readable) - 1, (wanted,))]
    where = draws.permutation(pairs)
    src, dst = (torch.full((pairs,), -1, dtype=torch.int32) for _ in range(2))
    src[where[:wanted]], dst[where[:wanted]] = sources.int(), targets.int()
    # Of the pairs to skip, some name one page that would do harm: page 0 as a source, or as a target.
    src[where[wanted::3]] = 0
    dst[where[wanted + 1 :: 3]] = 0
    if device.type == "meta":
        caches = torch.empty(shape, dtype=dtype, device=device)
    else:
        caches = torch.full(shape, poison(torch.float32), device=device).to(dtype)
        read = sources.unique()
        values = draws.normal((count, len(read), *shape[2:]), torch.float32, axes["values"]).to(dtype)
        as_bits(caches)[:, read.to(device)] = as_bits(values)
    inputs = {"src": draws.laid_out(src.to(device)), "dst": draws.laid_out(dst.to(device))}
    return {"caches": _laid_out(caches, str(axes["layout"])), **inputs}


_ORDERS = {
    "layer_major": (0, 1, 2, 3, 4),  # the engine's
    "page_major": (1, 0, 2, 3, 4),  # all of a page's caches side by side
    "head_major": (0, 1, 3, 2, 4),
}
"""Layout -> the order of the caches' dims in memory, outermost first."""


def _laid_out(caches: torch.Tensor, layout: str) -> torch.Tensor:
    """The caches [C, P, S, Hkv, D] in poisoned storage, their dims in the layout's order."""
    if layout == "joint":  # two caches' heads side by side, of which this is the first
        return poisoned_views([caches, torch.full_like(caches[..., :3], poison(caches.dtype))], dim=-1)[0]
    order = _ORDERS[layout]
    back = [order.index(dim) for dim in range(caches.dim())]
    return poisoned_views([caches.permute(order)], dim=0)[0].permute(back)


def bytes_moved(case: Case) -> int:
    caches, src, dst = (case.inputs[name] for name in ("caches", "src", "dst"))
    kept = (src >= 0) & (dst >= 0)
    page_bytes = caches[:, 0].numel() * caches.element_size()
    return int(src[kept].unique().numel() + int(kept.sum())) * page_bytes + 4 * (src.numel() + dst.numel())


def flops(case: Case) -> int:
    return 0


def _count(inputs: Inputs) -> int:
    return int(inputs["src"].shape[0])


def _take(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    """Every picked pair writes a fresh poisoned page of its own, the last one first, behind the pages there are."""
    caches, src, dst = inputs["caches"], inputs["src"], inputs["dst"]
    chosen = torch.tensor(picks, dtype=torch.long, device=src.device)
    by_page = caches.transpose(0, 1)  # [P, C, S, Hkv, D]
    fresh = torch.full_like(by_page[:1], poison(caches.dtype)).expand(len(picks), *by_page.shape[1:])
    rows = torch.cat((as_bits(by_page), as_bits(fresh))).view(caches.dtype)
    own = torch.arange(len(picks) - 1, -1, -1, device=src.device, dtype=torch.int32) + caches.shape[1]
    return {
        "caches": lay_out_like(rows, by_page).transpose(0, 1),
        "src": lay_out_like(src[chosen], src),
        "dst": lay_out_like(torch.where(dst[chosen] < 0, -1, own), dst),
    }


def _part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    source, target = int(inputs["src"][member]), int(inputs["dst"][member])
    return {"caches": results["caches"][:, target]} if source >= 0 and target >= 0 else {}


CONTRACT = Contract(
    name="copy_pages",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("pairs", 0, 2**31 - 1, (0, 1, 2, 3), "pairs of pages", batch=True, wide=(20,)),
        Int("C", 1, 65535, (1, 2, 3), "caches: two a layer"),
        Int("P", 1, 2**31 - 1, (1, 2, 3, 5), "pages in each cache", wide=(130,)),
        Int("S", 1, 65535, (1, 2, 3, 16), "slots in a page"),
        Int("Hkv", 1, 1024, (1, 2, 3, 5), "KV heads"),
        Int("D", 1, 1024, (1, 16, 31, 64, 80), "head dim"),
        dtype_axis("kv", "float8_e4m3fn"),
        Choice("layout", (*_ORDERS, "joint"), "of the caches in memory"),
        Choice("skipped", ("none", "some", "all"), "pairs of -1", wide=("none", "some"), hiding=("all",)),
        Choice("values", KINDS),
    ),
    arguments={
        "caches": Tensor("C P S Hkv D", "kv"),
        "src": Tensor("pairs", "int32"),
        "dst": Tensor("pairs", "int32"),
    },
    writes=("caches",),
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="page_parts",
    benchmarks={  # Qwen3-4B's layers: one fork of n samples, and the samples of a full batch
        f"{pairs}_pages": {
            "pairs": pairs,
            "C": 72,
            "P": pairs + 16,  # the others are not touched, and a CPU makes them too: of 1,024 pages, 7 GB
            "S": 16,
            "Hkv": 8,
            "D": 128,
            "kv": "bfloat16",
            "layout": "layer_major",
            "skipped": "none",
        }
        for pairs in (4, 256)
    },
    batching=Batching(_count, _take, _part),
)
