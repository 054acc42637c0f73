"""sort_by_expert: which expert computes which pairs of token and choice, and in which tiles of rows."""

from collections.abc import Mapping
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, Value
from tkernels.inputs import LAYOUTS, Draws
from tkernels.ops.experts import ROUTINGS, TILES_DIM, draw_experts


def reference(
    experts: torch.Tensor, num_experts: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the pairs of token and choice by expert, and cuts each expert's into tiles of `tile`.

    Args:
        experts: [T, K] int32 in [-1, num_experts), free row stride: pair t * K + k is token t's choice k, by the
            expert that computes it; -1 for nobody. Other values are undefined: nobody looks.
        num_experts: E, how many there are.
        tile: 16, 32, 64 or 128.

    Returns:
        order [T * K] int32: the pairs of expert 0, of expert 1 and so on, those of one expert ascending (the sort is
        stable: what is computed from it depends on no schedule), and -1 in place of every pair that nobody computes.
        starts [E + 1] int32: expert e's pairs are order[starts[e]:starts[e + 1]].
        tile_expert, tile_start [(T * K + min(T * K, E) * (tile - 1)) // tile] int32, the most tiles there can be: each
        tile's expert, in ascending order, and the place in `order` where it begins; both -1 behind the last tile.

    Source: the aligned blocks of vLLM's fused_moe (Kwon et al., 2023), with tiles of indices in place of padded ones.
    """
    pairs = experts.numel()
    device = experts.device
    keys = torch.where(experts < 0, num_experts, experts).flatten()  # [T K]
    ordered, order = keys.sort(stable=True)
    order = torch.where(ordered < num_experts, order, -1).int()
    starts = torch.searchsorted(ordered, torch.arange(num_experts + 1, dtype=ordered.dtype, device=device))  # [E + 1]
    tiles = (starts.diff() + tile - 1) // tile  # [E]
    ends = tiles.cumsum(0)
    places = torch.arange((pairs + min(pairs, num_experts) * (tile - 1)) // tile, device=device)
    expert = torch.searchsorted(ends, places, right=True)  # num_experts behind the last tile
    of = expert.clamp(max=num_experts - 1)
    first = starts[of] + (places - (ends - tiles)[of]) * tile
    is_tile = expert < num_experts
    return order, starts.int(), torch.where(is_tile, expert, -1).int(), torch.where(is_tile, first, -1).int()


baseline = reference


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    experts, tile = int(axes["E"]), int(axes["tile"])
    chosen = draw_experts(
        draws, int(axes["T"]), int(axes["K"]), experts, str(axes["routing"]), dropped=bool(axes["dropped"])
    )
    return {"experts": draws.laid_out(chosen, axes["layout"]), "num_experts": experts, "tile": tile}


def bytes_moved(case: Case) -> int:
    pairs, experts, tile = case.inputs["experts"].numel(), int(case.inputs["num_experts"]), int(case.inputs["tile"])
    tiles = (pairs + min(pairs, experts) * (tile - 1)) // tile
    return 4 * (2 * pairs + experts + 1 + 2 * tiles)


def flops(case: Case) -> int:
    return 0


def _part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    """In whose part of the order a token's pairs lie, and in whose tiles: -1 for pairs that are in none."""
    top_k = int(inputs["experts"].shape[1])
    pairs = torch.arange(member * top_k, (member + 1) * top_k, device=results["order"].device)
    found, place = (results["order"] == pairs.unsqueeze(1)).max(dim=1)  # [K]
    expert = torch.searchsorted(results["starts"], place.int(), right=True) - 1
    tile = (results["tile_start"] >= 0).logical_and(results["tile_start"] <= place.unsqueeze(1)).sum(1) - 1
    return {
        "order": torch.where(found, expert, -1),
        "tile_expert": torch.where(found, results["tile_expert"][tile].long(), -1),
    }


_TOKENS = row_batching("experts")


def _benchmark(tokens: int, top_k: int, experts: int) -> dict[str, Value]:
    point: dict[str, Value] = {"T": tokens, "K": top_k, "E": experts, "tile": 16 if tokens <= 64 else 128}
    return point | {"routing": "uniform", "dropped": False}


CONTRACT = Contract(
    name="sort_by_expert",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 9, 40), "tokens", batch=True, wide=(70,)),
        Int("K", 1, 64, (1, 2, 4), "experts of a token"),
        Int("E", 1, 2**12, (4, 5, 8, 1, 130), "experts"),
        Int("tile", 16, 128, (16, 32, 64), "pairs of a tile"),
        Choice("dropped", (False, True), "whether some pairs have no expert"),
        Choice("routing", ROUTINGS),
        Choice("layout", LAYOUTS, "of experts"),
    ),
    constraints=(Constraint("K <= E"), Constraint("T * K < 2**31"), Constraint("tile & (tile - 1) == 0")),
    arguments={
        "experts": Tensor("T K", "int32"),
        "num_experts": Scalar(int, axis="E", low=1),
        "tile": Scalar(int, axis=True, low=1),
    },
    outputs={
        "order": Output("T*K", "int32", exact=True),
        "starts": Output("E+1", "int32", exact=True),
        "tile_expert": Output(TILES_DIM, "int32", exact=True),
        "tile_start": Output(TILES_DIM, "int32", exact=True),
    },
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="auto",
    benchmarks={
        f"T={tokens},K={top_k},E={experts}": _benchmark(tokens, top_k, experts)
        for tokens in (1, 8, 64, 256, 4096, 32768)
        for top_k, experts in ((2, 8), (4, 32), (8, 128))
    },
    batching=Batching(_TOKENS.count, _TOKENS.take, _part),
)
