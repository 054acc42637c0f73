"""scaled_matmul: a linear layer whose input and weight are 8-bit codes, with a scale for each token and each output."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, DType, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.products import ROW_CLASSES
from tkernels.quantized.row_codes import CODES, SMALLEST_SCALE

MOST_INPUTS = (2**31 - 1) // 128**2
"""131071: more products of int8 codes, -128 among them, might leave int32."""


def reference(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """out[m, n] = (sum over k of q[m, k] * weight[n, k]) * scale[m] * weight_scale[n], plus bias[n].

    Args:
        q: [M, K] int8 or float8_e4m3fn, free row stride: a token's codes, as quantize_tokens makes them. K is at most
            131071: the sums of int8 codes are exact in int32 then, whatever the codes.
        scale: [M] float32: what a token's codes are multiplied by.
        weight: [N, K], as q, free row stride: one row of codes per output feature.
        weight_scale: [N] float32: what an output's codes are multiplied by.
        bias: [N], in out_dtype.
        out_dtype: Of the result, any float dtype.

    Returns:
        out [M, N] in out_dtype, rounded once, from fp32 (float64 where scale is float64: the oracle).

    Source: Dettmers et al., LLM.int8(), 2022 (vector-wise scales); Xiao et al., SmoothQuant, 2023.
    """
    wide = torch.promote_types(scale.dtype, out_dtype)
    out = (q.to(wide) @ weight.to(wide).t()) * scale.unsqueeze(-1) * weight_scale  # [M, N]
    if bias is not None:
        out = out + bias
    return out if scale.dtype == torch.float64 else out.to(out_dtype)


def baseline(
    q: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    # What has int32 sums in torch takes some shapes and some devices only; float64's are exact as well.
    sums = torch.float64 if q.dtype == torch.int8 else torch.promote_types(torch.float32, out_dtype)
    wide = torch.promote_types(torch.float32, out_dtype)
    out = (q.to(sums) @ weight.to(sums).t()).to(wide) * scale.unsqueeze(-1) * weight_scale
    return (out if bias is None else out + bias).to(out_dtype)


STEP = {"ordinary": 1.0, "zeros": 1.0, "huge": 8.0, "tiny": 2.0**-9}
"""Of fp8 codes: whole numbers, of which fp32 sums the products without error, up to 448, and subnormal ones."""
FP8_SPREAD = 16.0
_SIZE = {"ordinary": 73.0, "zeros": 73.0, "huge": 127.0, "tiny": 0.8}
"""Of int8 codes, as the root of their mean square."""


def draw_codes(shape: tuple[int, int], dtype: torch.dtype, kind: str, draws: Draws) -> torch.Tensor:
    """Codes of a kind. Not int8's 127, which is what nobody may read."""
    if draws.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device=draws.device)
    if dtype == torch.int8:
        low, high = (-1, 1) if kind == "tiny" else (-128, 126)
        codes = draws.integers(low, high, shape)
        if kind == "huge":
            codes = torch.where(codes < 0, low, high)
        return codes.to(dtype).to(draws.device)
    whole = (draws.normal(shape, torch.float64) * FP8_SPREAD).round()
    return (whole * STEP[kind]).clamp(-448.0, 448.0).to(dtype)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    codes, out, kind = dtype_of(axes["codes"]), dtype_of(axes["out"]), str(axes["values"])
    q, weight = (draw_codes((rows, inputs), codes, kind, draws) for rows in (tokens, outputs))
    scale, weight_scale = (draws.normal((rows,), torch.float32).abs() + 0.1 for rows in (tokens, outputs))
    # So that outputs are of size 1 whatever K is.
    size = _SIZE[kind] if codes == torch.int8 else FP8_SPREAD * STEP[kind]
    weight_scale /= size**2 * inputs**0.5
    if kind == "zeros" and device.type != "meta":  # tokens of zeros, as quantize_tokens makes them
        q[::2], scale[::2] = 0, SMALLEST_SCALE
    bias = draws.laid_out(draws.grid_normal((outputs,), out)) if axes["bias"] else None
    return {
        "q": draws.laid_out(q, axes["layout"]),
        "scale": draws.laid_out(scale),
        "weight": draws.laid_out(weight, axes["weight_layout"]),
        "weight_scale": draws.laid_out(weight_scale),
        "bias": bias,
        "out_dtype": out,
    }


def bytes_moved(case: Case) -> int:
    q, weight, bias = (case.inputs[name] for name in ("q", "weight", "bias"))
    out_bytes = case.inputs["out_dtype"].itemsize
    scales = 4 * (q.shape[0] + weight.shape[0])
    return int(q.numel() + weight.numel() + scales + (q.shape[0] + (bias is not None)) * weight.shape[0] * out_bytes)


def flops(case: Case) -> int:
    outputs, inputs = case.inputs["weight"].shape
    return 2 * int(case.inputs["q"].shape[0]) * int(outputs) * int(inputs)


CONTRACT = Contract(
    name="scaled_matmul",
    reference=reference,
    baseline=baseline,
    axes=(
        # 1 last: compiling ahead of time takes the last draw, and that one every variant supports.
        Int("M", 0, 2**31 - 1, (0, 2, 3, 17, 40, 1), "tokens", batch=True, wide=(1, 16), classes=ROW_CLASSES),
        Int("N", 1, 2**24, (1, 8, 31, 40, 72), "output features", wide=(136,)),
        Int("K", 1, MOST_INPUTS, (1, 8, 31, 64, 100, 257, 136), "input features", wide=(640,)),
        Choice("codes", CODES, "dtype of q and weight"),
        dtype_axis("out"),
        Choice("bias", (False, True)),
        Choice("layout", LAYOUTS, "of q"),
        Choice("weight_layout", LAYOUTS, "of weight"),
        Choice("values", (*KINDS, "zeros"), hiding=("zeros",)),
    ),
    arguments={
        "q": Tensor("M K", "codes", read_wide=True),
        "scale": Tensor("M", "float32"),
        "weight": Tensor("N K", "codes", read_wide=True),
        "weight_scale": Tensor("N", "float32"),
        "bias": Tensor("N", "out", optional=True),
        "out_dtype": DType("out"),
    },
    outputs={"out": Output("M N", "out")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="auto",
    benchmarks={
        f"M={tokens},N={outputs},K={inputs},{codes}": {
            "M": tokens,
            "N": outputs,
            "K": inputs,
            "codes": codes,
            "out": "bfloat16",
            "bias": False,
        }
        for tokens in (1, 16, 64, 128, 2048)
        # Qwen3-4B's qkv, attention output, gate-up and down projections.
        for outputs, inputs in ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728))
        for codes in ("float8_e4m3fn", "int8")
    },
    # One tile of outputs, and a block of inputs more than the most splits: each would be one block, were there more.
    corners={"most_splits": {"M": 1, "N": 64, "K": 33 * 128}},
    batching=row_batching("q", "scale"),
    work="gemm",
)
