"""The sort as a part of another op's launcher, in that launch's own workspace."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from tkernels import Axes, Buffer, DeviceFacts, Run
from tkernels.ops.sort_by_expert.auto import ALGORITHMS
from tkernels.ops.sort_by_expert.contract import CONTRACT

_CONFIG = ALGORITHMS.default[""]


def table_buffers(axes: Axes, tile: int, device: DeviceFacts) -> Mapping[str, Buffer]:
    """What `sorted_by_expert` needs in the workspace, by names that the op's own buffers may not have.

    Args:
        axes: T, K and E among them.
        tile: Pairs of a tile.
    """
    sizes = {**axes, "tile": tile}
    tables = {
        name: Buffer(tuple(dim.size(sizes) for dim in output.shape), torch.int32)
        for name, output in CONTRACT.outputs.items()
    }
    return tables | dict(ALGORITHMS.workspace(sizes, _CONFIG, device))


def sorted_by_expert(run: Run, experts: torch.Tensor, num_experts: int, tile: int) -> tuple[torch.Tensor, ...]:
    """Launches the sort by the algorithm that is for so many pairs, with its default config.

    Args:
        run: Of the launcher that calls it; its workspace has `table_buffers`.
        experts: [T, K] int32, as sort_by_expert takes it, like the other two.

    Returns:
        order, starts, tile_expert, tile_start.
    """
    tables = tuple(run.workspace[name] for name in CONTRACT.outputs)
    axes = {"T": experts.shape[0], "K": experts.shape[1], "E": num_experts}
    mine = replace(run, axes=axes, config=_CONFIG)
    ALGORITHMS.launch(mine, *tables, experts, num_experts=num_experts, tile=tile)
    return tables
