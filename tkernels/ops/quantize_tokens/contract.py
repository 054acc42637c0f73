"""quantize_tokens: each token's activations as 8-bit codes, with a scale found on the fly or fixed beforehand."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, DType, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.quantized.row_codes import CODES, LARGEST, SMALLEST_SCALE, codes_and_scales, codes_at


def reference(
    x: torch.Tensor, *, dtype: torch.dtype = torch.int8, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric codes of each row: x[m, k] is about q[m, k] * scale[m], and the row's largest value is the top code.

    Args:
        x: [M, K], any float dtype, free row stride, finite (a row with an infinity or a NaN has undefined codes).
        dtype: Of the codes: torch.int8 (-127 to 127) or torch.float8_e4m3fn (-448 to 448).
        static_scale: [1] float32, at least 2**-126: every token's scale, fixed beforehand, as calibration finds it.
            What is beyond the codes then becomes the last of them: -128 or 127, -448 or 448.

    Returns:
        q [M, K] in `dtype`, scale [M] float32. Both are exact: computed in fp32, whatever x's dtype (float64 is rounded
        to it first), one rounding an operation, ties to even: scale = max(max|x| * fp32(1 / 127 or 448), 2**-126) and
        q = x * fp32(1 / scale). A row of zeros has codes 0 and the scale 2**-126. With a static scale, scale is it M
        times.

    Source: dynamic per-token quantization as in Yao et al., ZeroQuant, 2022, for fp8 Micikevicius et al., FP8 Formats
    for Deep Learning, 2022.
    """
    wide = x.float()
    if static_scale is not None:
        return codes_at(wide, static_scale.float(), dtype), static_scale.float().repeat(x.shape[0])
    return codes_and_scales(wide, wide.abs().amax(dim=-1), dtype)


def baseline(
    x: torch.Tensor, *, dtype: torch.dtype = torch.int8, static_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if static_scale is not None:
        return codes_at(x.float(), static_scale, dtype), static_scale.repeat(x.shape[0])
    # The norm reads x once; absolute values would be written first.
    largest = torch.linalg.vector_norm(x, float("inf"), dim=-1).float()
    return codes_and_scales(x.float(), largest, dtype)


NASTY = ("zeros", "outlier", "subnormal", "ties")


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    shape = int(axes["M"]), int(axes["K"])
    dtype, codes, kind = dtype_of(axes["activation"]), dtype_of(axes["codes"]), axes["values"]
    x = draws.normal(shape, dtype, "ordinary" if kind in NASTY else kind)
    if device.type != "meta" and shape[0]:
        x = nasty(x, kind, codes, draws)
        if kind not in NASTY:  # the largest at the end, which a search that ends too soon leaves out
            x[::2, -1] = 2 * x[::2].abs().amax(dim=1)
    scale = draws.laid_out(_fixed_scale(x, codes)) if axes["static_scale"] else None
    return {"x": draws.laid_out(x, axes["layout"]), "dtype": codes, "static_scale": scale}


def _fixed_scale(x: torch.Tensor, codes: torch.dtype) -> torch.Tensor:
    """[1] float32 at which the largest values are beyond the codes' range, and others are not."""
    if x.device.type == "meta" or not x.numel():
        return torch.ones(1, device=x.device)
    return (x.double().abs().amax() * 0.4 / LARGEST[codes]).clamp(min=SMALLEST_SCALE).float().view(1)


def nasty(x: torch.Tensor, kind: Any, codes: torch.dtype, draws: Draws) -> torch.Tensor:
    """The values [M, K] made as bad as their kind says."""
    rows, inputs = x.shape
    finfo = torch.finfo(x.dtype)
    place = draws.integers(0, inputs - 1, (rows, 1)).to(x.device)
    if kind == "zeros":  # every other row, the first among them, all zeros
        x[::2] = 0
    elif kind == "outlier":  # beside the largest number that there is, all others round to zero
        x.scatter_(1, place, finfo.max)
    elif kind == "subnormal":  # from the smallest number up to what has a normal scale
        steps = draws.integers(-(2**9), 2**9, (rows, inputs)).to(x.device)
        smallest = max(finfo.smallest_normal * finfo.eps, 2.0**-149)
        x = (steps.double() * smallest * 2.0 ** draws.integers(0, 20, (rows, 1)).to(x.device)).to(x.dtype)
    elif kind == "ties":  # halfway between two codes, at a scale that is a power of two
        top = LARGEST[codes]
        if codes == torch.int8:
            halves = draws.integers(-127, 126, (rows, inputs)) + 0.5
        else:
            odd = 2 * draws.integers(8, 14, (rows, inputs)) + 1  # halfway between two 4-bit significands
            halves = odd * 2.0 ** draws.integers(-10, 3, (rows, inputs)) * (1 - 2 * draws.integers(0, 1, (rows, 1)))
        halves = halves.double().to(x.device).scatter_(1, place, top)
        x = (halves * 2.0 ** draws.integers(-6, 6, (rows, 1)).to(x.device)).to(x.dtype)
    return x


def bytes_moved(case: Case) -> int:
    x = case.inputs["x"]
    return int(x.numel() * (x.element_size() + 1) + 4 * (x.shape[0] + (case.inputs["static_scale"] is not None)))


def flops(case: Case) -> int:
    """A comparison, a product and a rounding for each element."""
    return 3 * int(case.inputs["x"].numel())


CONTRACT = Contract(
    name="quantize_tokens",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("M", 0, 2**31 - 1, (0, 1, 2, 3, 5), "tokens", batch=True, wide=(4,)),
        Int("K", 1, 2**24, (1, 8, 31, 64, 100, 128, 257), "features", wide=(1000, 4100)),
        dtype_axis("activation"),
        Choice("codes", CODES, "dtype of the codes"),
        Choice("static_scale", (False, True), "every token's scale is given"),
        Choice("layout", LAYOUTS),
        Choice("values", (*KINDS, *NASTY)),
    ),
    arguments={
        "x": Tensor("M K", "activation"),
        "dtype": DType("codes"),
        "static_scale": Tensor("1", "float32", optional=True),
    },
    outputs={"q": Output("M K", "codes", exact=True), "scale": Output("M", "float32", exact=True)},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="row_per_program",
    benchmarks={
        f"M={tokens},K={inputs},{codes}": {"M": tokens, "K": inputs, "activation": "bfloat16", "codes": codes}
        for tokens in (1, 64, 2048)
        # Qwen3-4B's hidden size, attention output and intermediate size: what its linear layers read.
        # And Llama-3.1-405B's down projection's.
        for inputs in (2560, 4096, 53248, 9728)
        for codes in ("float8_e4m3fn", "int8")
    },
    inspected={"static": {"static_scale": True}},
    batching=row_batching("x"),
)
