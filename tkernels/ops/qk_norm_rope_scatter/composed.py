"""The chosen qk_norm_rope, which rotates k in place, and then the chosen kv_scatter.

Wins nowhere by itself: keys go to memory and back between the two launches. It is what lets either part be swapped.
"""

from collections.abc import Callable

import torch

from tkernels import Variant


def composed(
    qk_norm_rope: Callable[..., None],
    kv_scatter: Callable[..., None],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    qk_norm_rope(q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight, eps=eps, interleaved=interleaved)
    if k_scale is None and v_scale is None:  # unnamed, they cost no look: this is called in every layer
        kv_scatter(k, v, k_cache, v_cache, slots)
    else:
        kv_scatter(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


VARIANT = Variant(
    wins="where a part has a variant that is faster than what the fusions save",
    parts=("qk_norm_rope", "kv_scatter"),
    function=composed,
    deterministic=True,
    batch_invariant=False,  # it is what its parts are
)
