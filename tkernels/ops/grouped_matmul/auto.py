"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

from typing import Any

import torch

from tkernels import Axes, DeviceFacts, Run, Variant
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.grouped_matmul._argument import needs_codes, needs_dense, needs_e4m3
from tkernels.quantized.stacked import interleaved_experts

ALGORITHMS = Algorithms(
    "grouped_matmul",
    (
        "gemv_per_pair",
        "dequant_gemv",
        "fp8_gemv",
        "tensor_descriptor",
        "persistent",
        "dequant_padded_tiles",
        "fp8_padded_tiles",
        "padded_tiles",
    ),
)


def launch(
    run: Run,
    out: torch.Tensor,
    x: torch.Tensor,
    weight: Any,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    bias: torch.Tensor | None,
    combine: torch.Tensor | None,
) -> None:
    ALGORITHMS.launch(run, out, x, weight, experts, order, starts, tile, tile_expert, tile_start, bias, combine)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    return None if needs_dense(axes) is None or needs_e4m3(axes) is None else needs_codes(axes)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    supports=supports,
    workspace=ALGORITHMS.workspace,
    chosen=ALGORITHMS.chosen,
    prepare=interleaved_experts,
    key=("T", "K", "E", "N", "C", "tile", "bits", "coding"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm
)
