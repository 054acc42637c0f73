"""What the ops of mixtures of experts share on the host: drawn routings, and the sizes that follow from a routing."""

import torch

from tkernels.inputs import Draws

ROUTINGS = ("uniform", "zipf", "one_takes_all", "one_takes_none")
"""How often an expert is drawn: each alike; as the inverse of its rank to the power of 1.2, which load-balanced models
come near on the text of one field; the first for every token; the first for none."""

DROPPED = -1
"""In place of an expert: a pair of token and choice that nobody computes, as padding's, or another device's expert."""

TILES = (16, 32, 64, 128)
"""Pairs of one expert that may be multiplied as one tile of rows."""

TILES_DIM = "(T*K+min(T*K,E)*(tile-1))//tile"
"""The most tiles that pairs of T tokens, K each, and E experts make, each expert's last one partly full."""


def draw_experts(draws: Draws, tokens: int, top_k: int, experts: int, routing: str, *, dropped: bool) -> torch.Tensor:
    """[T, K] int32, distinct experts for each token, in no order. dropped: every third pair or so is."""
    weights = torch.ones(experts, dtype=torch.float64)
    if routing == "zipf":
        weights = torch.arange(1, experts + 1, dtype=torch.float64) ** -1.2
    elif routing == "one_takes_none" and experts > top_k:
        weights[0] = 0
    # The largest of log(weight) plus Gumbel noise are a draw without replacement (Kool et al., 2019).
    keys = weights.log() - _exponential(draws, tokens, experts).log()
    if routing == "one_takes_all":
        keys[:, 0] = torch.inf
    chosen = keys.topk(top_k, dim=1).indices  # [T, K]
    chosen = chosen.gather(1, _exponential(draws, tokens, top_k).argsort(1))
    if dropped:
        chosen = torch.where(draws.integers(0, 2, (tokens, top_k)) == 0, DROPPED, chosen)
    return chosen.int().to(draws.device)


def _exponential(draws: Draws, rows: int, columns: int) -> torch.Tensor:
    return -torch.rand((rows, columns), generator=draws.generator, dtype=torch.float64).log()


def layout_of_weights(layout: str, seed: int) -> str:
    """Of what experts in `layout` count: that one or contiguous, so that neither's stride serves for the other."""
    return layout if seed % 2 else "contiguous"


def distinct_experts(experts: torch.Tensor) -> int:
    """How many experts a routing needs."""
    return int(experts[experts >= 0].unique().numel())


def tile_of_pairs(pairs: int, experts: int) -> int:
    """The tile for so many pairs: the smallest that holds an expert's mean share of them, or the largest there is.

    By reasoning. Smaller ones read an expert's weight more often than once; larger ones are mostly padding.
    """
    return next((tile for tile in TILES if tile * experts >= pairs), TILES[-1])
