"""Every sequence reads all of its keys, shared or not: paged_decode's last_arriver.

Wins where there is little to share: in a batch of few sequences, a tile of their queries is as empty as decode's own,
and what it saves are keys that one multiprocessor reads anyway while others idle.
"""

import torch

from tkernels import Run, Variant
from tkernels.ops.paged_decode import last_arriver

_DECODE = last_arriver.VARIANT


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
    last_arriver.launch(
        run, out, lse, q, k_cache, v_cache, block_tables, context_lens, scale, max_context_len=max_context_len,
        window=window, k_scale=k_scale, v_scale=v_scale, soft_cap=soft_cap, sinks=sinks, return_lse=return_lse,
    )  # fmt: skip


VARIANT = Variant(
    wins="few sequences, or prefixes of less than a split",
    launch=launch,
    configs=tuple(
        config for config in last_arriver.CONFIGS if not config.launch_pdl
    ),  # that is for a file's own kernels
    limits=_DECODE.limits,
    default=_DECODE.default,
    supports=_DECODE.supports,
    workspace=_DECODE.workspace,
    key=_DECODE.key,
    sum_order=_DECODE.sum_order,
    deterministic=True,
    batch_invariant=True,
)
