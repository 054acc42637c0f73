"""Pairs of tokens and experts in the order of the experts, for peers that multiply what is sorted already."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.peers.variants import MadeOnce
from tkernels.contract import Axes
from tkernels.device import DeviceFacts


@dataclass(frozen=True)
class SortedPairs:
    """Pair p = t K + k of token t and its choice k.

    Attributes:
        order: [T K] int32, the pairs by expert, those of one expert in the order of tokens.
        places: [T K] int32, where each pair is in it.
        tokens: [T K] int32, of the pairs in that order.
        counts: [E] int32, of each expert.
        ends: [E] int32, where each expert's pairs end.
    """

    order: torch.Tensor
    places: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, num_experts: int) -> SortedPairs:
        """Those of a routing [T, K] in which every pair has an expert."""
        choices = experts.flatten().long()
        order = choices.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=choices.device)
        counts.index_add_(0, choices, torch.ones_like(choices))
        parts = (order, order.argsort(), order // experts.shape[1], counts, counts.cumsum(0))
        return cls(*(part.int() for part in parts))


_sorted: MadeOnce[SortedPairs] = MadeOnce()


def sorted_pairs(experts: torch.Tensor, num_experts: int) -> SortedPairs:
    """The sorted pairs, made once for the same tensor: how its pairs are sorted is no part of a peer's time."""
    return _sorted.get({"experts": experts}, lambda: SortedPairs.of(experts, num_experts))


def refuse_other_experts(axes: Axes, device: DeviceFacts) -> str | None:
    """Why a peer for dense weights, and for pairs that all have an expert, cannot take these."""
    if axes.get("bits", 0):
        return f"it reads dense weights, not codes of {axes['bits']} bits"
    if axes.get("dropped", False):
        return "it takes no pair without an expert"
    return None
