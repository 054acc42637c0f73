"""One of the other algorithms, picked by the number of tokens: from this device's timings, or by reasoning.

Wins wherever the number of tokens varies: see `algorithms`.
"""

import torch

from tkernels import Axes, Run, Variant
from tkernels.contract import Value
from tkernels.inputs import dtype_name
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.code_sums import unsupported_sums

SPLIT_K_TOKENS = 64
"""By reasoning: so many tokens are one row of tiles, far fewer than fill a device, unless K is split."""


def by_tokens(tokens: int) -> str:
    """The algorithm for a number of tokens where nothing was tuned."""
    return "split_k" if tokens <= SPLIT_K_TOKENS else "tiled"


def in_order(axes: Axes, tuned: tuple[str, ...]) -> tuple[str, ...]:
    """What to try: one that does not take so many tokens gives way to the default."""
    return (*tuned, by_tokens(int(axes["M"])))


ALGORITHMS = Algorithms("scaled_matmul", ("split_k", "tiled"), in_order)


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
