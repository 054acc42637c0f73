"""quantize_groups: each 128 activations of a token as e4m3 codes with a scale of their own, found on the fly."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.quantize_tokens.contract import NASTY, nasty
from tkernels.quantized.row_codes import BLOCK, codes_and_scales

CODES = torch.float8_e4m3fn


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes of each group: x[m, k] is about q[m, k] * scale[m, k // 128], the group's largest value 448.

    Args:
        x: [M, K], any float dtype, free row stride, finite; K a multiple of 128.

    Returns:
        q [M, K] float8_e4m3fn, scale [M, K / 128] float32. Both are exact: those that quantize_tokens gives a row of
        the group's 128 values.

    Source: DeepSeek-AI, DeepSeek-V3, 2024, section 3.3.2.
    """
    groups = x.float().unflatten(1, (-1, BLOCK))  # [M, K / 128, 128]
    q, scale = codes_and_scales(groups, groups.abs().amax(dim=-1), CODES)
    return q.flatten(1), scale


def baseline(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The norm reads x once; absolute values would be written first.
    groups = x.unflatten(1, (-1, BLOCK))
    q, scale = codes_and_scales(groups.float(), torch.linalg.vector_norm(groups, float("inf"), dim=-1).float(), CODES)
    return q.flatten(1), scale


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    groups = int(axes["M"]) * int(axes["K"]) // BLOCK
    dtype, kind = dtype_of(axes["activation"]), axes["values"]
    x = draws.normal((groups, BLOCK), dtype, "ordinary" if kind in NASTY else kind)
    if device.type != "meta" and groups:
        x = nasty(x, kind, CODES, draws)
    return {"x": draws.laid_out(x.view(int(axes["M"]), int(axes["K"])), axes["layout"])}


def bytes_moved(case: Case) -> int:
    x = case.inputs["x"]
    return int(x.numel() * (x.element_size() + 1) + x.numel() // BLOCK * 4)


def flops(case: Case) -> int:
    """A comparison, a product and a rounding for each element."""
    return 3 * int(case.inputs["x"].numel())


CONTRACT = Contract(
    name="quantize_groups",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("M", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(4,)),
        Int("K", BLOCK, 2**24, (128, 256, 640), "features", wide=(1280,)),
        dtype_axis("activation"),
        Choice("layout", LAYOUTS),
        Choice("values", (*KINDS, *NASTY)),
    ),
    constraints=(Constraint(f"K % {BLOCK} == 0"),),
    arguments={"x": Tensor("M K", "activation")},
    outputs={
        "q": Output("M K", "float8_e4m3fn", exact=True),
        "scale": Output(f"M K/{BLOCK}", "float32", exact=True),
    },
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="group_tile",
    benchmarks={
        f"M={tokens},K={inputs}": {"M": tokens, "K": inputs, "activation": "bfloat16"}
        for tokens in (1, 64, 2048)
        # Qwen3-4B's hidden size, attention output and intermediate size: what its linear layers read.
        for inputs in (2560, 4096, 9728)
    },
    batching=row_batching("x"),
)
