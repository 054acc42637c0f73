"""one_launch or unshared, picked by the number of sequences: from this device's timings, or by reasoning.

Wins wherever the number of sequences varies: see `algorithms`. What they share is in tensors, which no launcher reads:
an engine that has nothing to share calls paged_decode.
"""

import torch

from tkernels import Run, Variant
from tkernels.ops.algorithms import Algorithms
from tkernels.ops.paged_decode._attend import unsupported

ALGORITHMS = Algorithms("cascade_decode", ("one_launch", "unshared"))


def launch(
    run: Run,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    group_starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None,
    max_prefix_len: int | None,
    window: int | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    return_lse: bool,
) -> None:
    ALGORITHMS.launch(
        run, out, lse, q, k_cache, v_cache, block_tables, context_lens, group_starts, prefix_lens, scale,
        max_context_len=max_context_len, max_prefix_len=max_prefix_len, window=window, k_scale=k_scale,
        v_scale=v_scale, soft_cap=soft_cap, sinks=sinks, return_lse=return_lse,
    )  # fmt: skip


VARIANT = Variant(
    wins="wherever the number of sequences varies: each call runs the algorithm that is the fastest at its size",
    launch=launch,
    configs=ALGORITHMS.configs,
    default=ALGORITHMS.default,
    limits=ALGORITHMS.limits,
    supports=unsupported,
    workspace=ALGORITHMS.workspace,
    chosen=ALGORITHMS.chosen,
    key=("B", "N", "Hq", "Hkv", "D", "Dv", "S"),
    deterministic=True,
    batch_invariant=False,  # another number of sequences may be another algorithm
)
