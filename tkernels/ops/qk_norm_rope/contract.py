"""qk_norm_rope: each query and key head normalized (where the model has such norms), then rotated by its position."""

from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Scalar, Tensor, dtype_axis
from tkernels.inputs import ROW_KINDS, Draws, dtype_of, poison, poisoned_views


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> None:
    """Writes q and k: the root-mean-square norm over each head, then rotary position embedding of its first R dims.

    Args:
        q: [T, Hq, D], any float dtype, free token and head strides (a view of a fused QKV row). Written.
        k: [T, Hkv, D], as q. Written.
        cos, sin: [L, R/2] float32 (float64 beside float64 heads), free row strides: row p holds the R/2 angles of
            position p in radians; R <= D.
        positions: [T] int64, each in [0, L). Not checked: that would wait for the device.
        q_weight, k_weight: [D], as q: the norms' weights. Both or neither; without them nothing is normalized.
        eps: Added to the mean square, at least 0.
        interleaved: Rotate dims (2i, 2i+1), as GPT-J does, instead of (i, i + R/2), as GPT-NeoX and Llama do.

    Source: Su et al., RoFormer, 2021; the norms as in Qwen3 (Technical Report, 2025, section 2).
    """
    angle_cos, angle_sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, R/2]
    rotary = 2 * cos.shape[-1]
    for heads, weight in ((q, q_weight), (k, k_weight)):
        normed = heads.clone()  # [T, heads, D]
        if weight is not None:
            normed = heads * torch.rsqrt(heads.square().mean(dim=-1, keepdim=True) + eps) * weight
        pairs = normed[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
        first, second = pairs.unbind(-1 if interleaved else -2)  # [T, heads, R/2]
        rotated = (first * angle_cos - second * angle_sin, second * angle_cos + first * angle_sin)
        heads.copy_(normed)
        heads[..., :rotary] = torch.stack(rotated, dim=-1 if interleaved else -2).flatten(-2)


def baseline(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> None:
    (tokens, q_heads, width), k_heads, half = q.shape, k.shape[1], cos.shape[-1]
    angle_cos = cos.index_select(0, positions).unsqueeze(1)  # [T, 1, R/2]
    angle_sin = sin.index_select(0, positions).unsqueeze(1)
    rotary = 2 * half
    one, two = (slice(0, rotary, 2), slice(1, rotary, 2)) if interleaved else (slice(0, half), slice(half, rotary))
    # [T, Hq + Hkv, D]: every call below serves queries and keys. As wide as the tables, and rounded once, when stored.
    together = _are_side_by_side(q, k)
    heads = q.as_strided((tokens, q_heads + k_heads, width), q.stride()) if together else torch.cat((q, k), dim=1)
    both = heads.to(cos.dtype)
    if q_weight is not None and k_weight is not None:
        both = F.rms_norm(both, (width,), None, eps)
        both[:, :q_heads].mul_(q_weight)
        both[:, q_heads:].mul_(k_weight)
        if rotary < width:
            heads[..., rotary:] = both[..., rotary:]
    first, second = both[..., one], both[..., two]  # [T, Hq + Hkv, R/2]
    rotated_first = (first * angle_cos).addcmul_(second, angle_sin, value=-1)
    heads[..., two] = (second * angle_cos).addcmul_(first, angle_sin)
    heads[..., one] = rotated_first
    if not together:
        q.copy_(heads[:, :q_heads])
        k.copy_(heads[:, q_heads:])


def _are_side_by_side(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether k's heads follow q's in memory, as in a fused QKV row: then one view holds both."""
    return (
        q.dtype == k.dtype
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and q.stride() == k.stride()
        and k.storage_offset() == q.storage_offset() + q.shape[1] * q.stride(1)
    )


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, head_dim, dtype = int(axes["T"]), int(axes["D"]), dtype_of(axes["activation"])
    length, half = int(axes["L"]), int(axes["R"]) // 2
    heads = {"q": int(axes["Hq"]), "k": int(axes["Hkv"]), "v": int(axes["Hkv"])}
    q, k, v = (draws.normal((tokens, count, head_dim), dtype, axes["values"]) for count in heads.values())
    # The last row of the tables is always in use, where a read past it can be seen.
    positions = (length - 1 - draws.integers(0, length - 1, (tokens,)) * torch.arange(tokens).clamp(max=1)).to(device)
    angles = draws.normal((length, half), torch.float64) * 3
    used = torch.zeros(length, 1, dtype=torch.bool, device=device).index_fill_(0, positions, True)
    cos, sin = (
        torch.where(used, table, poison(table.dtype)).to(dtype_of(axes["table"]))
        for table in (angles.cos(), angles.sin())
    )
    layout = axes["layout"]
    if layout == "fused":  # as the engine has them: one projection's row, one table
        q, k, _ = poisoned_views([q, k, torch.full_like(v, poison(dtype))], dim=1)
        cos, sin = poisoned_views([cos, sin], dim=-1)
    elif layout == "head_major":
        q, k = draws.laid_out(q, "head_major"), draws.laid_out(k, "head_major")
        cos, sin = draws.laid_out(cos, "padded"), draws.laid_out(sin)
    else:  # "mixed": no two tensors share their strides
        first = "padded" if layout == "mixed" else "contiguous"
        q, sin = draws.laid_out(q, first), draws.laid_out(sin, first)
        k, cos = draws.laid_out(k), draws.laid_out(cos)
    weights: dict[str, torch.Tensor | None] = {"q_weight": None, "k_weight": None}
    for name in weights:
        if axes[name]:
            weights[name] = draws.laid_out(draws.normal((head_dim,), dtype))
    return {
        "q": q,
        "k": k,
        "cos": cos,
        "sin": sin,
        "positions": draws.laid_out(positions),
        **weights,
        "eps": draws.epsilon(),
        "interleaved": bool(axes["interleaved"]),
    }


def bytes_moved(case: Case) -> int:
    q, k, cos, weight = (case.inputs[name] for name in ("q", "k", "cos", "q_weight"))
    width = q.shape[-1] if weight is not None else 2 * cos.shape[-1]  # without a norm, dims past R stay where they are
    heads = 2 * q.shape[0] * (q.shape[1] + k.shape[1]) * width * q.element_size()
    rows = int(case.inputs["positions"].unique().numel())
    tables = 2 * rows * cos.shape[-1] * cos.element_size() + 8 * q.shape[0]
    return int(heads + tables + (2 * weight.numel() * weight.element_size() if weight is not None else 0))


def flops(case: Case) -> int:
    q, k, cos, weight = (case.inputs[name] for name in ("q", "k", "cos", "q_weight"))
    rotation, norm = 6 * cos.shape[-1], 4 * q.shape[-1] if weight is not None else 0
    return int(q.shape[0] * (q.shape[1] + k.shape[1]) * (rotation + norm))


CONTRACT = Contract(
    name="qk_norm_rope",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3), "tokens", batch=True, wide=(4,)),
        Int("Hq", 1, 1024, (1, 2, 3, 7), "query heads", wide=(32,)),
        Int("Hkv", 1, 1024, (1, 2, 5), "key heads", wide=(8,)),
        Int("D", 2, 1024, (2, 16, 31, 64, 80, 96, 128), "head dim"),
        Int("R", 2, 1024, (2, 12, 16, 64, 80, 128), "rotary dims"),
        Int("L", 1, 2**31 - 1, (1, 7, 40), "positions in the tables", wide=(5000,)),
        dtype_axis("activation"),
        Choice("table", ("float32",), "dtype of cos and sin", legal=("float32", "float64")),
        Choice("q_weight", (True, False), "whether queries are normalized"),
        Choice("k_weight", (True, False), "whether keys are normalized"),
        Choice("interleaved", (False, True)),
        Choice("layout", ("fused", "contiguous", "mixed", "head_major")),
        Choice("values", ROW_KINDS),
    ),
    constraints=(Constraint("R <= D"), Constraint("q_weight == k_weight")),
    arguments={
        "q": Tensor("T Hq D", "activation"),
        "k": Tensor("T Hkv D", "activation"),
        "cos": Tensor("L R/2", "table"),
        "sin": Tensor("L R/2", "table"),
        "positions": Tensor("T", "int64"),
        "q_weight": Tensor("D", "activation", optional=True),
        "k_weight": Tensor("D", "activation", optional=True),
        "eps": Scalar(float, low=0),
        "interleaved": Scalar(bool, axis=True),
    },
    writes=("q", "k"),
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="head_tile",
    benchmarks={
        f"T={tokens},Hq=32,Hkv=8,D=128": {
            "T": tokens,
            "Hq": 32,
            "Hkv": 8,
            "D": 128,
            "R": 128,
            "L": 40960,
            "activation": "bfloat16",
            "q_weight": True,
            "k_weight": True,
            "interleaved": False,
            "layout": "fused",
        }
        for tokens in (1, 64, 4096)
    },
    batching=row_batching("q", "k", "positions"),
)
