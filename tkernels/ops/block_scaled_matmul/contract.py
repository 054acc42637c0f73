"""block_scaled_matmul: a linear layer in e4m3 codes, with a scale for each block of the weight and group of a token."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, DType, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.products import ROW_CLASSES
from tkernels.ops.scaled_matmul.contract import FP8_SPREAD, STEP, draw_codes
from tkernels.quantized.row_codes import BLOCK, SMALLEST_SCALE
from tkernels.quantized.scaled_weight import spread_blocks


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """out[m, n] = sum over k of (q[m, k] * scale[m, k // 128]) * (weight[n, k] * weight_scale[n // 128, k // 128]),
    plus bias[n].

    Args:
        q: [M, K] float8_e4m3fn, free row stride: a token's codes, as quantize_groups makes them; K a multiple of 128.
        scale: [M, K / 128] float32: what a group's codes are multiplied by.
        weight: [N, K], as q, free row stride: one row of codes per output feature.
        weight_scale: [ceil(N / 128), K / 128] float32: what a block's codes are multiplied by.
        bias: [N], in out_dtype.
        out_dtype: Of the result, any float dtype.

    Returns:
        out [M, N] in out_dtype, rounded once, from fp32 (float64 where scale is float64: the oracle).

    Source: DeepSeek-AI, DeepSeek-V3, 2024, section 3.3.2.
    """
    wide = torch.promote_types(scale.dtype, out_dtype)
    tokens = q.to(wide) * scale.to(wide).repeat_interleave(BLOCK, 1)  # [M, K]
    dense = weight.to(wide) * spread_blocks(weight_scale.to(wide), weight.shape[0])  # [N, K]
    out = tokens @ dense.t()
    if bias is not None:
        out = out + bias
    return out if scale.dtype == torch.float64 else out.to(out_dtype)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    codes, out, kind = dtype_of(axes["codes"]), dtype_of(axes["out"]), str(axes["values"])
    q, weight = (draw_codes((rows, inputs), codes, kind, draws) for rows in (tokens, outputs))
    scale, weight_scale = (
        draws.normal((rows, inputs // BLOCK), torch.float32).abs() + 0.1 for rows in (tokens, -(-outputs // BLOCK))
    )
    # So that outputs are of size 1 whatever K is.
    weight_scale /= (FP8_SPREAD * STEP[kind]) ** 2 * inputs**0.5
    if kind == "zeros" and device.type != "meta":  # groups of zeros, as quantize_groups makes them
        q[::2, :BLOCK], scale[::2, 0] = 0, SMALLEST_SCALE
    bias = draws.laid_out(draws.grid_normal((outputs,), out)) if axes["bias"] else None
    return {
        "q": draws.laid_out(q, axes["layout"]),
        "scale": draws.laid_out(scale, axes["layout"]),
        "weight": draws.laid_out(weight, axes["weight_layout"]),
        "weight_scale": draws.laid_out(weight_scale, axes["weight_layout"]),
        "bias": bias,
        "out_dtype": out,
    }


def bytes_moved(case: Case) -> int:
    q, weight, bias = (case.inputs[name] for name in ("q", "weight", "bias"))
    scales = 4 * (case.inputs["scale"].numel() + case.inputs["weight_scale"].numel())
    out_bytes = case.inputs["out_dtype"].itemsize
    return int(q.numel() + weight.numel() + scales + (q.shape[0] + (bias is not None)) * weight.shape[0] * out_bytes)


def flops(case: Case) -> int:
    outputs, inputs = case.inputs["weight"].shape
    return 2 * int(case.inputs["q"].shape[0]) * int(outputs) * int(inputs)


CONTRACT = Contract(
    name="block_scaled_matmul",
    reference=reference,
    baseline=reference,  # torch multiplies codes by blocks on a few GPUs alone; elsewhere this is its way
    axes=(
        # 1 last: compiling ahead of time takes the last draw, and that one every variant supports.
        Int("M", 0, 2**31 - 1, (0, 2, 3, 17, 1), "tokens", batch=True, wide=(1, 16), classes=ROW_CLASSES),
        Int("N", 1, 2**24, (1, 8, 40, 136), "output features", wide=(136,)),
        Int("K", BLOCK, 2**24, (128, 256), "input features", wide=(640,)),
        Choice("codes", ("float8_e4m3fn",), "dtype of q and weight"),
        dtype_axis("out"),
        Choice("bias", (False, True)),
        Choice("layout", LAYOUTS, "of q and scale"),
        Choice("weight_layout", LAYOUTS, "of weight and weight_scale"),
        Choice("values", (*KINDS, "zeros"), hiding=("zeros",)),
    ),
    constraints=(Constraint(f"K % {BLOCK} == 0"),),
    arguments={
        "q": Tensor("M K", "codes", read_wide=True),
        "scale": Tensor(f"M K/{BLOCK}", "float32"),
        "weight": Tensor("N K", "codes", read_wide=True),
        "weight_scale": Tensor(f"ceil(N/{BLOCK}) K/{BLOCK}", "float32"),
        "bias": Tensor("N", "out", optional=True),
        "out_dtype": DType("out"),
    },
    outputs={"out": Output("M N", "out")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="auto",
    benchmarks={
        f"M={tokens},N={outputs},K={inputs}": {
            "M": tokens,
            "N": outputs,
            "K": inputs,
            "codes": "float8_e4m3fn",
            "out": "bfloat16",
            "bias": False,
        }
        for tokens in (1, 16, 64, 128, 2048)
        # Qwen3-4B's qkv, attention output, gate-up and down projections.
        for outputs, inputs in ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728))
    },
    # One tile of outputs, and a block of inputs more than the most splits: each would be one block, were there more.
    corners={"most_splits": {"M": 1, "N": 64, "K": 33 * 128}},
    batching=row_batching("q", "scale"),
    work="gemm",
)
