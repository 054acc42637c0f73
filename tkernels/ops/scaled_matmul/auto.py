"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

import torch

from tkernels import Run, Variant
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.code_sums import unsupported_sums

ALGORITHMS = Algorithms("scaled_matmul", ("split_k", "tiled"))


def launch(
    run: Run,
    out: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    ALGORITHMS.launch(run, out, q, scale, weight, weight_scale, bias, out_dtype)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    supports=unsupported_sums,
    workspace=ALGORITHMS.workspace,
    chosen=ALGORITHMS.chosen,
    key=("M", "N", "K"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm, and fp8 sums of another order
)
