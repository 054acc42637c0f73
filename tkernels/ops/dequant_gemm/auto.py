"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies. Every algorithm reads the same interleaved weight, so the choice is made at
each call, on shapes alone: see `algorithms`.
"""

import torch

from tkernels import Axes, Run, Variant
from tkernels.inputs import dtype_name
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.dequant_gemm._argument import axes_of, needs_interleaved
from tkernels.quantized.weight import QuantizedWeight, interleaved

SPLIT_K_TOKENS = 64
"""Up to 32 its rows cost next to nothing; up to 64 the weight is unpacked twice, but by programs that fill the device,
which tiles of 64 rows do not."""

TILED_TOKENS = 512
"""By reasoning: at 8192 x 8192 on an H200 the dense weight's way to memory and back costs 250 MB, 60 us, and 512 tokens
take cuBLAS 90; the tiles that unpack as they go run at perhaps two thirds of its rate."""


def by_tokens(tokens: int) -> str:
    """The algorithm for a number of tokens where nothing was tuned."""
    if tokens <= 1:
        return "gemv"
    if tokens <= SPLIT_K_TOKENS:
        return "split_k"
    return "tiled" if tokens <= TILED_TOKENS else "dequantize_then_matmul"


def in_order(axes: Axes, tuned: tuple[str, ...]) -> list[str]:
    """What to try: one that does not take so many tokens gives way to the default, and where that does not take such a
    weight, `tiled` does. Where codes are looked up, gemv is called lookup_gemv.
    """
    names = [*tuned, by_tokens(int(axes["M"])), "tiled"]
    looks_up = axes.get("coding", "uniform") == "lookup"
    return ["lookup_gemv" if looks_up and name == "gemv" else name for name in names]


ALGORITHMS = Algorithms("dequant_gemm", ("gemv", "split_k", "tiled", "dequantize_then_matmul"), in_order)


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
    axes = {"M": x.shape[0], "activation": dtype_name(x.dtype), **axes_of(weight)}
    ALGORITHMS.launch(run, axes, out, x, weight, bias)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    supports=needs_interleaved,
    workspace=ALGORITHMS.workspace,
    prepare=interleaved,
    key=("M", "N", "K", "bits", "coding", "permuted", "sparse", "group_size"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm
)
