"""The chosen paged_prefill attends to each group's prefix, the chosen paged_decode to what each sequence has alone, and
the chosen merge_states puts the two together.

A group is one sequence of paged_prefill whose queries all see all of the prefix. Wins nowhere by itself: the groups are
taken apart by torch on the device, in a dozen launches, and both parts are rounded. It is what lets a part be swapped.
"""

from collections.abc import Callable
from typing import Any

import torch

from tkernels import Variant


def composed(
    paged_prefill: Callable[..., Any],
    paged_decode: Callable[..., Any],
    merge_states: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    group_starts: torch.Tensor,
    prefix_lens: torch.Tensor,
    scale: float,
    *,
    max_context_len: int | None = None,
    max_prefix_len: int | None = None,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "soft_cap": soft_cap}
    groups, sequences = prefix_lens.shape[0], q.shape[0]
    if window is not None or groups == 0 or sequences == 0:
        # A window begins at another key of the prefix for each sequence, for which paged_prefill has no word.
        return paged_decode(
            q, k_cache, v_cache, block_tables, context_lens, scale, max_context_len=max_context_len, window=window,
            sinks=sinks, return_lse=return_lse, **options,
        )  # fmt: skip
    page = k_cache.shape[1]
    # Of a group without sequences all is undefined, and one without a prefix has no keys: they get one of page 0, which
    # is there, for queries whose result is not looked at.
    shared = prefix_lens.where(group_starts.diff() > 0, 0)  # [G]
    firsts = group_starts[:-1].clamp_max(sequences - 1)
    prefixes = block_tables.index_select(0, firsts).where(shared.unsqueeze(1) > 0, 0)  # [G, N]
    numbers = torch.arange(sequences, dtype=group_starts.dtype, device=q.device)
    group = torch.searchsorted(group_starts[1:].contiguous(), numbers, right=True)  # [B], G of those in none
    cached = torch.cat((shared, shared.new_zeros(1))).index_select(0, group)  # [B], of each sequence's prefix
    out_prefix, lse_prefix = paged_prefill(
        q, k_cache, v_cache, prefixes, group_starts, shared.clamp_min(1), scale,
        max_context_len=max_context_len if max_prefix_len is None else max(max_prefix_len, 1), return_lse=True,
        causal=False, **options,
    )  # fmt: skip
    columns = torch.arange(block_tables.shape[1], device=q.device)
    own = (columns + (cached // page).unsqueeze(1)).clamp_max_(block_tables.shape[1] - 1)  # [B, N]
    out, lse = paged_decode(
        q, k_cache, v_cache, block_tables.gather(1, own), context_lens - cached, scale,
        max_context_len=max_context_len, return_lse=True, **options,
    )  # fmt: skip
    # Sinks count once: here, and in neither part.
    lse_prefix.masked_fill_((cached == 0).unsqueeze(1), -torch.inf)
    merged = merge_states(out_prefix, lse_prefix, out, lse, sinks=sinks)
    return merged if return_lse else merged[0]


VARIANT = Variant(
    wins="where a part has a variant that is ahead by more than one launch saves",
    parts=("paged_prefill", "paged_decode", "merge_states"),
    part_axes={
        "paged_prefill": {"B": "G", "T": "B", "window": 0, "sinks": False, "return_lse": True, "causal": False},
        "paged_decode": {"return_lse": True},
        "merge_states": {"T": "B"},
    },
    function=composed,
    deterministic=True,
    batch_invariant=False,  # it is what its parts are
)
