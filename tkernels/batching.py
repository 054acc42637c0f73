"""How an op's batch is taken apart into members: what lets a test put one row or one sequence beside others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tkernels.inputs import poison

Inputs = Mapping[str, Any]
"""An op's arguments by name."""


@dataclass(frozen=True)
class Batching:
    """The members of an op's batch, independent of each other by definition: its rows, or its sequences.

    Attributes:
        count: Inputs -> how many members there are.
        take: (inputs, picks) -> new inputs of the batch that holds the picked members in that order. One may come
            twice. Tensors that belong to members are copied, with the layout they had and poison wherever nobody may
            read; the others are shared, so a test clones what the op writes.
        part: (inputs, results, member) -> that member's share of each result, by name of the output or written
            argument. Elements that the op leaves untouched are not part of it.
        loosen: Inputs -> the same batch behind wider tables and looser host-side bounds, where the op has any.
    """

    count: Callable[[Inputs], int]
    take: Callable[[Inputs, Sequence[int]], dict[str, Any]]
    part: Callable[[Inputs, Mapping[str, torch.Tensor], int], dict[str, torch.Tensor]]
    loosen: Callable[[Inputs], dict[str, Any]] = dict


def lay_out_like(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A copy of `rows` [n, ...] in fresh poisoned storage with the layout of `like` [m, ...].

    The order of the dims in memory, the gaps between rows, and where the first element lies within 16 stay: a launch
    compiles for the alignment of pointers and strides, and only the batch is to differ.
    """
    shape, before = rows.shape, like.stride()
    strides = list(before)
    row_span = 1 + sum((n - 1) * stride for n, stride in zip(shape[1:], before[1:], strict=True))
    if before[0] < row_span:  # a head-major view: the rows lie inside the heads, whose stride follows from their number
        step = 1
        for dim in sorted(range(len(shape)), key=lambda dim: (before[dim], dim > 0)):
            strides[dim], step = step, step * shape[dim]
    start = like.storage_offset() % 16
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if rows.numel() else 0
    storage = torch.full((start + span + 16,), poison(rows.dtype), dtype=rows.dtype, device=rows.device)
    return storage.as_strided(shape, strides, start).copy_(rows)


def row_batching(*names: str, caches: Sequence[str] = (), slots: str | None = None) -> Batching:
    """The batching of a row-wise op: a member is one index of dim 0 of the named arguments, and of every output.

    `caches` [P, S, ...] are written instead where the argument `slots` [T] sends each row: then every member of a new
    batch gets a slot of its own, the last one first, in fresh poisoned pages, of which there are as many as it takes. A
    row whose slot is -1 has no part of them.
    """

    def count(inputs: Inputs) -> int:
        return int(inputs[names[0]].shape[0])

    def take(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
        taken = dict(inputs)
        for name in names:
            rows = inputs[name]
            taken[name] = lay_out_like(rows[torch.tensor(picks, dtype=torch.long, device=rows.device)], rows)
        if slots is None:
            return taken
        before = inputs[slots]
        page_size = inputs[caches[0]].shape[1]
        pages = max(inputs[caches[0]].shape[0], -(-len(picks) // page_size))
        wanted = pages * page_size - 1 - torch.arange(len(picks), device=before.device)
        skipped = before[torch.tensor(picks, dtype=torch.long, device=before.device)] < 0
        taken[slots] = lay_out_like(torch.where(skipped, -1, wanted), before)
        for name in caches:
            cache = inputs[name]
            empty = torch.full_like(cache[:1], poison(cache.dtype)).expand(pages, *cache.shape[1:])
            taken[name] = lay_out_like(empty, cache)
        return taken

    def part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
        parts = {name: result[member] for name, result in results.items() if name not in caches}
        slot = int(inputs[slots][member]) if slots is not None else -1
        if slot >= 0:
            page, offset = divmod(slot, inputs[caches[0]].shape[1])
            parts |= {name: results[name][page, offset] for name in caches}
        return parts

    return Batching(count, take, part)
