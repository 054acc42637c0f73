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

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[UnitPart, ...]:
        return (UnitPart(2, (block_size, self.num_kv_heads, self.head_dim), self.dtype or dtype),)


def store_pages_as(kinds: Sequence[CacheKind], dtype: torch.dtype | None) -> tuple[CacheKind, ...]:
    """`kinds` with keys and values kept as `dtype`; None is the model's."""
    return tuple(replace(kind, dtype=dtype) if isinstance(kind, Pages) else kind for kind in kinds)


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
