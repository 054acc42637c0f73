"""one_program or histogram, picked by the number of pairs: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

import torch

from tkernels import Run, Variant
from tkernels.ops.algorithms import Algorithms

ALGORITHMS = Algorithms("sort_by_expert", ("one_program", "histogram"))


def launch(
    run: Run,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    tile: int,
) -> None:
    ALGORITHMS.launch(run, order, starts, tile_expert, tile_start, experts, num_experts=num_experts, tile=tile)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    workspace=ALGORITHMS.workspace,
    chosen=ALGORITHMS.chosen,
    key=("T", "E", "K", "tile"),
    deterministic=True,
    batch_invariant=False,  # of a sort it says little, but the number of tokens picks the algorithm
)
