"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies. Every algorithm reads the same interleaved weight, so the choice is made at
each call, on shapes alone: see `algorithms`.
"""

import torch

from tkernels import Run, Variant
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.dequant_gemm._argument import needs_interleaved
from tkernels.quantized.weight import QuantizedWeight, interleaved

ALGORITHMS = Algorithms("dequant_gemm", ("gemv", "lookup_gemv", "split_k", "dequantize_then_matmul", "tiled"))


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    ALGORITHMS.launch(run, out, x, weight, bias)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    supports=needs_interleaved,
    workspace=ALGORITHMS.workspace,
    chosen=ALGORITHMS.chosen,
    prepare=interleaved,
    key=("M", "N", "K", "bits", "coding", "permuted", "sparse", "group_size"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm
)
