"""What a sequence keeps in the caches, by kind: each group of a model's layers declares one.

A cache is divided into units that are lent, shared, kept for later prefixes and swapped as a whole. Of most kinds a
unit holds a block of tokens and stays as it is once it is full (pages). Of the others it is one state for each
sequence, which every token changes; to go on from a prefix, a state as of exactly its end must have been kept. The
scheduler knows this difference and nothing of what is inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class UnitPart:
    """What one unit holds of each layer: `per_layer` tensors of `shape` and `dtype`."""

    per_layer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class CacheKind(Protocol):
    """What a sequence keeps in a group of layers. Frozen: it is part of a ModelConfig."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The group's layers, ascending."""

    @property
    def state_interval(self) -> int | None:
        """None: a unit holds a block of tokens. Else a unit is a sequence's state, which is kept for later prefixes
        every so many blocks and at the last whole block of each prompt. Chunks of prompts end there, so that a short
        interval makes many steps of a long prompt.
        """

    @property
    def window(self) -> int | None:
        """None: all that a sequence keeps is read to its end. Else no token reads a block of tokens that lies wholly
        before the last so many, itself included, and such blocks are given back.
        """

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[UnitPart, ...]:
        """What a unit holds of each layer.

        Args:
            block_size: Tokens of a block.
            dtype: The one that the engine serves the model in.
        """


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values of every token, [S, Hkv, D] each for a block of S tokens; `dtype` is theirs, None the model's."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype | None = field(default=None, kw_only=True)

    @property
    def state_interval(self) -> None:
        return None

    @property
    def window(self) -> int | None:
        return None

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[UnitPart, ...]:
        return (UnitPart(2, (block_size, self.num_kv_heads, self.head_dim), self.dtype or dtype),)


def store_pages_as(kinds: Sequence[CacheKind], dtype: torch.dtype | None) -> tuple[CacheKind, ...]:
    """`kinds` with keys and values kept as `dtype`; None is the model's."""
    return tuple(replace(kind, dtype=dtype) if isinstance(kind, Pages) else kind for kind in kinds)


@dataclass(frozen=True, slots=True)
class WindowedPages(Pages):
    """Keys and values of the last `size` tokens, which are all that a query of any of the layers sees.

    A sequence holds ceil((size + chunk) / S) + 1 pages at most, where a step computes `chunk` of its tokens.
    """

    size: int

    @property
    def window(self) -> int:
        return self.size


def pages_for(windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> Pages:
    """The pages of all layers of a model, each of which sees as many keys as `windows` says, None being all.

    They are windowed where every layer has a window. Where only some have one, the blocks are kept for the others.
    """
    layers, sizes = tuple(range(len(windows))), [size for size in windows if size is not None]
    if len(sizes) < len(windows):
        return Pages(layers, num_kv_heads, head_dim)
    return WindowedPages(layers, num_kv_heads, head_dim, max(sizes))


def unit_bytes(kinds: Sequence[CacheKind], block_size: int, dtype: torch.dtype) -> int:
    """The bytes of one unit of each of `kinds`, over all their layers."""
    return sum(
        len(kind.layers) * part.per_layer * math.prod(part.shape) * part.dtype.itemsize
        for kind in kinds
        for part in kind.parts(block_size, dtype)
    )


def check_kinds(kinds: Sequence[CacheKind], num_layers: int) -> None:
    """Raise ValueError where `kinds` do not share the `num_layers` layers out, each to one of them."""
    layers = sorted(layer for kind in kinds for layer in kind.layers)
    if layers != list(range(num_layers)):
        raise ValueError(f"cache_kinds share out the layers {layers}, a model of {num_layers} has each of them once")
    intervals = [kind.state_interval for kind in kinds if kind.state_interval is not None]
    if any(interval < 1 for interval in intervals):
        raise ValueError(f"a kind's state_interval must be None or at least 1, got {min(intervals)}")
    if any(kind.window is not None and kind.window < 1 for kind in kinds):
        raise ValueError("a kind's window must be None or at least 1")
