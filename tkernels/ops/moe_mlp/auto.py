"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

from typing import Any

import torch

from tkernels import Axes, DeviceFacts, Run, Variant
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.moe_mlp._shared import supports_codes, supports_dense, supports_e4m3
from tkernels.quantized.stacked import interleaved_experts

ALGORITHMS = Algorithms(
    "moe_mlp",
    (
        "gemv_per_pair",
        "dequant_gemv",
        "fp8_gemv",
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
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Any,
    down: Any,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    limit: float | None,
) -> None:
    ALGORITHMS.launch(run, out, x, experts, weights, gate_up, down, gate_up_bias, down_bias, limit)


def supports(axes: Axes, device: DeviceFacts) -> str | None:
    if supports_dense(axes, device) is None or supports_e4m3(axes, device) is None:
        return None
    return supports_codes(axes, device)


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
    key=("T", "K", "E", "H", "I", "bits", "coding"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm
)
