"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

import torch

from tkernels import Run, Variant
from tkernels.ops.algorithms import Algorithms

ALGORITHMS = Algorithms("matmul", ("gemv", "split_k", "overlapped", "tensor_descriptor", "persistent"))


def launch(run: Run, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    ALGORITHMS.launch(run, out, x, weight, bias)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    workspace=ALGORITHMS.workspace,
    chosen=ALGORITHMS.chosen,
    key=("M", "N", "K"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm
)
