"""qk_norm_rope_scatter: all that attention needs done to one projection's row: query and key heads are normed and
rotated, keys and values go to the paged cache.
"""

import inspect
from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int
from tkernels.inputs import poisoned_views
from tkernels.ops.kv_scatter import contract as kv_scatter
from tkernels.ops.qk_norm_rope import contract as qk_norm_rope

_NORM_ROPE, _SCATTER = qk_norm_rope.CONTRACT, kv_scatter.CONTRACT


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """qk_norm_rope of q and k, then kv_scatter of k and v: writes q and the caches.

    Args:
        q: [T, Hq, D], any float dtype, free token and head strides (a view of a fused QKV row). Written.
        k: [T, Hkv, D], as q. Consumed: what it holds afterwards is undefined. A fusion leaves it as it was, for the
            rotated keys are wanted in the cache alone and their way through k would cost 8% more bytes (Hq 32, Hkv 8);
            a composition rotates it in place.
        v: [T, Hkv, Dv], as q.
        cos, sin: [L, R/2] float32 (float64 beside float64 heads), free row strides: the angles of each position.
        positions: [T] int64, each in [0, L). Not checked: that would wait for the device.
        k_cache: [P, S, Hkv, D] pages of S slots, free page, slot and head strides. Written.
        v_cache: [P, S, Hkv, Dv], as k_cache. Written.
        slots: [T] int64: page * S + offset, or -1 for a row whose keys and values are not kept (its queries are normed
            and rotated all the same). The others are distinct and less than P * S. Not checked.
        q_weight, k_weight: [D], as q: the norms' weights. Both or neither; without them nothing is normalized.
        eps: Added to the mean square, at least 0.
        interleaved: Rotate dims (2i, 2i+1) instead of (i, i + R/2).
        k_scale, v_scale: [Hkv] float32: what a stored value is to be multiplied by when it is read.
    """
    qk_norm_rope.reference(
        q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight, eps=eps, interleaved=interleaved
    )
    kv_scatter.reference(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def baseline(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    qk_norm_rope.baseline(
        q, k, cos, sin, positions, q_weight=q_weight, k_weight=k_weight, eps=eps, interleaved=interleaved
    )
    kv_scatter.baseline(k, v, k_cache, v_cache, slots, k_scale=k_scale, v_scale=v_scale)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    rotated = qk_norm_rope.make_inputs(axes, seed, device)
    layout = "padded" if axes["layout"] == "mixed" else "contiguous"
    scattered = kv_scatter.make_inputs({**axes, "layout": layout}, seed + 1, device)
    inputs = {**scattered, **rotated}  # k is the one to be rotated
    if axes["layout"] == "fused":  # as the engine has them: one projection's row
        names = ("q", "k", "v")
        inputs |= dict(zip(names, poisoned_views([inputs[name] for name in names], dim=1), strict=True))
    return {name: inputs[name] for name in CONTRACT.arguments}


def bytes_moved(case: Case) -> int:
    """What the parts move, less the keys that qk_norm_rope reads and writes for kv_scatter to read again."""
    k, cos, weight = (case.inputs[name] for name in ("k", "cos", "q_weight"))
    width = k.shape[2] if weight is not None else 2 * cos.shape[1]  # without a norm, dims past R stay where they are
    keys = 2 * int(k.shape[0] * k.shape[1] * width * k.element_size())
    return qk_norm_rope.bytes_moved(case) + kv_scatter.bytes_moved(case) - keys


def flops(case: Case) -> int:
    return qk_norm_rope.flops(case) + kv_scatter.flops(case)


_RULES = {**_NORM_ROPE.arguments, **_SCATTER.arguments}

CONTRACT = Contract(
    name="qk_norm_rope_scatter",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3), "tokens", batch=True, wide=(4,)),
        Int("Hq", 1, 1024, (1, 2, 3, 7), "query heads", wide=(32,)),
        Int("Hkv", 1, 1024, (1, 2, 5), "KV heads", wide=(8,)),
        Int("D", 2, 1024, (2, 16, 31, 64, 80, 96, 128), "head dim of queries and keys"),
        Int("Dv", 1, 1024, (1, 16, 31, 64, 96, 128), "value head dim"),
        Int("R", 2, 1024, (2, 12, 16, 64, 80, 128), "rotary dims"),
        *(_NORM_ROPE.axis_by_name[name] for name in ("L",)),
        *(_SCATTER.axis_by_name[name] for name in ("P", "S", "activation", "kv")),
        *(_NORM_ROPE.axis_by_name[name] for name in ("table", "q_weight", "k_weight", "interleaved")),
        *(_SCATTER.axis_by_name[name] for name in ("k_scale", "v_scale")),
        Choice("layout", ("fused", "contiguous", "mixed", "head_major"), "of q, k and v"),
        *(_SCATTER.axis_by_name[name] for name in ("cache_layout", "skipped", "values")),
    ),
    constraints=(
        *_NORM_ROPE.constraints,
        *_SCATTER.constraints,
        Constraint("layout != 'fused' or D == Dv"),
    ),
    arguments={name: _RULES[name] for name in inspect.signature(reference).parameters},
    writes=("q", "k_cache", "v_cache"),
    consumes=("k",),
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="head_tile",  # one launch for two, and the row goes to memory once
    benchmarks={  # the parts', of which each has a point for the same tokens
        name: {**rotated, **scattered}
        for (name, rotated), scattered in zip(_NORM_ROPE.benchmarks.items(), _SCATTER.benchmarks.values(), strict=True)
    },
    # Without a norm, which would make keys small.
    corners={name: {**corner, "k_weight": False} for name, corner in _SCATTER.corners.items()},
    batching=row_batching("q", "k", "v", "positions", caches=("k_cache", "v_cache"), slots="slots"),
)
