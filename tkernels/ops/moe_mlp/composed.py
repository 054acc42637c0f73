"""The chosen sort_by_expert, and then the chosen grouped_matmul, swiglu, and grouped_matmul again.

Wins where a part's variant is ahead by more than the traffic that a fusion saves: 4 T K I elements between the first
product and the activation. It is what lets a part be swapped.
"""

from collections.abc import Callable
from typing import Any

import torch

from tkernels import Variant
from tkernels.launch import Section
from tkernels.ops.experts import TILES, tile_of_pairs


def composed(
    sort_by_expert: Callable[..., tuple[torch.Tensor, ...]],
    grouped_matmul: Callable[..., torch.Tensor],
    swiglu: Callable[..., torch.Tensor],
    section: Section,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
) -> torch.Tensor:
    num_experts = gate_up.shape[0]
    tile = tile_of_pairs(experts.numel(), num_experts)
    with section("sort"):
        order, starts, tile_expert, tile_start = sort_by_expert(experts, num_experts, tile)
    routing = (experts, order, starts, tile, tile_expert, tile_start)
    with section("up"):
        pairs = grouped_matmul(x, gate_up, *routing, bias=gate_up_bias)  # [T, H] -> [T K, 2I]
        pairs = swiglu(pairs, limit=limit)  # [T K, I]; of pairs that are left out, of whatever was in memory
    with section("down"):
        return grouped_matmul(pairs, down, *routing, bias=down_bias, combine=weights)  # [T, H]


VARIANT = Variant(
    wins="where the best grouped_matmul is ahead by more than the traffic that a fusion saves",
    parts=("sort_by_expert", "grouped_matmul", "swiglu"),
    part_axes={
        "sort_by_expert": {"tile": TILES[-1]},
        # The first product; the second is T K rows of C = I to N = H, of which variants say the same.
        "grouped_matmul": {
            "tile": TILES[-1],
            "per_pair": False,
            "N": "2*I",
            "C": "H",
            "bias": "gate_up_bias",
            "combine": False,
            **{name: f"gate_up_{name}" for name in ("group_size", "padding", "symmetric", "permuted")},
        },
        "swiglu": {"T": "T*K"},
    },
    function=composed,
    deterministic=True,
    batch_invariant=False,  # it is what its parts are
)
