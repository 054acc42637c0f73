"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

import torch

from tkernels import Run, Variant
from tkernels.contract import Value
from tkernels.inputs import dtype_name
from tkernels.ops.algorithms import Algorithms, split_k_or_tiled
from tkernels.ops.code_sums import unsupported_sums

ALGORITHMS = Algorithms("scaled_matmul", ("split_k", "tiled"), split_k_or_tiled)


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
    axes: dict[str, Value] = {"M": q.shape[0], "N": weight.shape[0], "K": q.shape[1]}
    axes |= {"codes": dtype_name(q.dtype), "out": dtype_name(out_dtype)}
    ALGORITHMS.launch(run, axes, out, q, scale, weight, weight_scale, bias, out_dtype)


VARIANT = Variant(
    wins="wherever the number of tokens varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    supports=unsupported_sums,
    workspace=ALGORITHMS.workspace,
    key=("M", "N", "K"),
    deterministic=True,
    batch_invariant=False,  # another number of tokens may be another algorithm, and fp8 sums of another order
)
