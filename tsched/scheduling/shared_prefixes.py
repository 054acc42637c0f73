"""Which rows share their first blocks, so that attention reads these once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tsched.scheduling.block_pool import NO_BLOCK, BlockIds
from tsched.scheduling.sequence import Ints


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """g groups of rows, in an order of n rows in which the rows of a group are neighbours, and those of none come last.

    order       [n] int64, the entries
    starts      [g + 1] int64, where each group begins in that order, and where the last one ends
    num_blocks  [g] int64, the blocks that all rows of a group begin with, at least 1
    """

    order: Ints
    starts: Ints
    num_blocks: Ints


FindGroups = Callable[[BlockIds, Ints], SharedPrefixes]
"""As find_shared_prefixes."""

Groups = list[tuple[Ints, int]]
"""Rows, and how many blocks they share."""


def find_shared_prefixes(blocks: BlockIds, num_full: Ints) -> SharedPrefixes:
    """Groups rows so that few blocks are read, where a row is in one group at most.

    Rows make a tree: they share what lies above where they part. Where they do, each branch either is grouped as it
    would be by itself, or all its rows join one group of this parting, whichever saves more.

    Args:
        blocks: [n, W] int32, each row's blocks.
        num_full: [n] int64, how many of them are full, and may be shared.
    """
    firsts = np.where(num_full > 0, blocks[:, 0], NO_BLOCK)
    _, places, counts = np.unique(firsts, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero((counts[places] > 1) & (num_full > 0))  # who begins like nobody shares nothing
    rows, shared = _sort_rows(blocks[candidates], num_full[candidates])
    return _lay_out(_choose_groups(candidates[rows], shared), num_full.size)


def _lay_out(groups: Groups, num_entries: int) -> SharedPrefixes:
    order = np.concatenate([rows for rows, _ in groups]) if groups else np.empty(0, dtype=np.int64)
    alone = np.ones(num_entries, dtype=np.bool_)
    alone[order] = False
    starts = np.cumsum([0, *(rows.size for rows, _ in groups)])
    return SharedPrefixes(
        np.concatenate((order, np.flatnonzero(alone))), starts, np.array([depth for _, depth in groups], dtype=np.int64)
    )


def take_out_faulty(found: SharedPrefixes, blocks: BlockIds, num_full: Ints) -> tuple[SharedPrefixes, dict[int, str]]:
    """Takes entries out of groups that they may not be in, so that attention reads their own blocks for them alone.

    Args:
        found: The groups, by whoever found them.
        blocks: As for find_shared_prefixes, like `num_full`.

    Returns:
        (the other groups, entry -> what is wrong with its group).
    """
    entries = found.order[: found.starts[-1]]
    group = np.repeat(np.arange(found.num_blocks.size), np.diff(found.starts))  # [m], each entry's
    depth = found.num_blocks[group]
    places = np.arange(min(int(depth.max(initial=0)), blocks.shape[1]))
    begins = np.where(places < depth[:, None], blocks[entries, : places.size], NO_BLOCK)  # [m, places]
    usual = _find_usual(begins, found.starts, group)
    differ = begins != begins[usual]
    _, met = np.unique(entries, return_index=True)
    again = np.ones(entries.size, dtype=np.bool_)
    again[met] = False
    is_faulty = again | (depth > num_full[entries]) | differ.any(axis=1)
    if not is_faulty.any():
        return found, {}
    faults: dict[int, str] = {}
    for i in np.flatnonzero(is_faulty).tolist():
        entry, name = int(entries[i]), f"prefix group {group[i]}"
        if again[i]:
            fault = f"is also in {name}, and groups have no request in common"
        elif depth[i] > num_full[entry]:
            fault = f"has {num_full[entry]} full blocks, and {name} shares {depth[i]}: at most what each of it has"
        else:
            place = int(differ[i].argmax())
            fault = (
                f"begins with other blocks than {name}: block {place} is page {begins[i, place]}, and "
                f"{begins[usual[i], place]} of most requests of the group; of all of them it is the same"
            )
        faults.setdefault(entry, f"it {fault}")
    groups = [found.order[start:end] for start, end in pairwise(found.starts.tolist())]
    right = [rows[~np.isin(rows, list(faults))] for rows in groups]
    left = [(rows, int(depth)) for rows, depth in zip(right, found.num_blocks, strict=True) if rows.size > 1]
    return _lay_out(left, num_full.size), faults


def _find_usual(begins: Ints, starts: Ints, group: Ints) -> Ints:
    """The entry [m] that begins like most of each entry's group, the first of them."""
    usual = starts[:-1].copy()
    for odd in np.unique(group[(begins != begins[usual[group]]).any(axis=1)]):
        _, firsts, counts = np.unique(
            begins[starts[odd] : starts[odd + 1]], axis=0, return_index=True, return_counts=True
        )
        usual[odd] += firsts[counts == counts.max()].min()
    return usual[group]


def _sort_rows(blocks: BlockIds, num_full: Ints) -> tuple[Ints, Ints]:
    """(rows [n], those that begin alike side by side; how many blocks [n - 1] each shares with the next)."""
    width = int(num_full.max(initial=0))
    if width == 0:
        return np.arange(num_full.size), np.zeros(max(num_full.size - 1, 0), dtype=np.int64)
    keys = np.where(np.arange(width) < num_full[:, None], blocks[:, :width], NO_BLOCK)  # [n, width]
    rows = np.argsort(keys.view(np.dtype((np.void, keys.itemsize * width))).ravel(), kind="stable")
    keys = keys[rows]
    differ = keys[1:] != keys[:-1]
    shared = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
    return rows, np.minimum(shared, np.minimum(num_full[rows[1:]], num_full[rows[:-1]]))


@dataclass(frozen=True, slots=True)
class _Branch:
    """Rows first .. end-1 of the sorted ones, and what groups of them alone save."""

    first: int
    end: int
    saved: int
    groups: Groups


def _choose_groups(rows: Ints, shared: Ints) -> Groups:
    """The groups of sorted `rows` [n], of which neighbours share so many blocks [n - 1].

    A stack holds the partings that the last row is below, each with its branches so far: how deep they lie is what the
    next row shares with it. A recursion could be as deep as there are rows.
    """
    partings: list[tuple[int, list[_Branch]]] = [(0, [])]
    for i, depth in enumerate((*shared.tolist(), 0)[: rows.size]):
        branch = _Branch(i, i + 1, 0, [])
        while partings[-1][0] > depth:
            deep, branches = partings.pop()
            branch = _join(deep, [*branches, branch], rows)
        if partings[-1][0] < depth:
            partings.append((depth, []))
        partings[-1][1].append(branch)
    return [group for branch in partings[0][1] for group in branch.groups]


def _join(depth: int, branches: list[_Branch], rows: Ints) -> _Branch:
    """The branches of a parting below `depth` blocks, as one."""
    gains = [(one.end - one.first) * depth - one.saved for one in branches]
    gained = sum(gain for gain in gains if gain > 0) - depth
    together = gained > 0
    groups = [
        group for one, gain in zip(branches, gains, strict=True) if not (together and gain > 0) for group in one.groups
    ]
    if together:
        joining = [rows[one.first : one.end] for one, gain in zip(branches, gains, strict=True) if gain > 0]
        groups.append((np.concatenate(joining), depth))
    saved = sum(one.saved for one in branches) + max(gained, 0)
    return _Branch(branches[0].first, branches[-1].end, saved, groups)
