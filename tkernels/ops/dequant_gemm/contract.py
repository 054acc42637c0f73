"""dequant_gemm: a linear layer whose weight is stored as short codes."""

from itertools import count
from typing import Any

import torch
import torch.nn.functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Tensor, Value, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.dequant_gemm._argument import QuantizedWeightArgument
from tkernels.ops.matmul import contract as matmul
from tkernels.ops.products import ROW_CLASSES
from tkernels.quantized.codes import ORDERS, pack_codes
from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.weight import E2M1_VALUES, QuantizedWeight, dequantize, interleaved


def reference(x: torch.Tensor, weight: QuantizedWeight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    """out[m, n] = sum over k of x[m, k] * W[n, k], plus bias[n].

    Args:
        x: [M, K], any float dtype, free row stride.
        weight: N outputs, K inputs (see QuantizedWeight), of x's dtype.
        bias: [N], as x.

    Returns:
        out [M, N], as x.
    """
    out = x @ dequantize(weight, x.dtype).t()
    return out if bias is None else out + bias


def baseline(x: torch.Tensor, weight: QuantizedWeight, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, dequantize(weight, x.dtype), bias)


def _drawn_outliers(draws: Draws, outputs: int, inputs: int, dtype: torch.dtype, unit: float) -> Outliers:
    """One input of 128 for each output, many times as large as `unit`; all inputs for the first output (SqueezeLLM's
    full rows), none for the last.
    """
    each = 1 + inputs // 128
    if draws.device.type == "meta":
        rows, cols = (torch.empty(n, dtype=torch.int32, device="meta") for n in (outputs + 1, each * outputs))
        return Outliers(rows, cols, torch.empty(each * outputs, dtype=dtype, device="meta"))
    of = torch.cat((torch.zeros(inputs), torch.arange(1, outputs - 1).repeat_interleave(each))).long()
    cols = torch.cat((torch.arange(inputs), draws.integers(0, inputs - 1, (of.numel() - inputs,))))
    vals = draws.normal(of.shape, torch.float64).cpu() * unit
    vals[inputs:] *= 16  # not the full row, or that output alone would decide what error is natural
    vals = vals.to(dtype)
    return outliers_from(of, cols, vals, (outputs, inputs)).map_tensors(lambda part: part.to(draws.device))


def draw_weight(axes: Axes, draws: Draws) -> QuantizedWeight:
    """A sequential weight, its values such that outputs are of x's size whatever K is."""
    outputs, inputs, bits = (int(axes[name]) for name in ("N", "K", "bits"))
    places, group_size, dtype = inputs + int(axes["padding"]), int(axes["group_size"]), dtype_of(axes["weight"])
    levels, groups = 2**bits, places // group_size
    codes, zeros = draws.integers(0, levels - 1, (places, outputs)), draws.integers(0, levels, (groups, outputs))
    # Both ends of the range in every draw: a sign that leaks from the top code or a zero-point less one must show.
    codes[:, 0], codes[:, -1] = levels - 1, 0
    zeros[:, 0], zeros[:, -1] = 0, levels
    unit = inputs**-0.5
    is_e2m1 = axes["coding"] == "e2m1"
    # Codes less zero-points are two uniform numbers' difference.
    square = sum(value**2 for value in E2M1_VALUES) / levels if is_e2m1 else (levels**2 - 1) / 6
    step = unit / square**0.5
    scales = (draws.normal((groups, outputs), torch.float64).abs() + 0.1) * step
    table = draws.normal((levels, outputs), torch.float64) * unit
    permutation = draws.permutation(places)
    packed, high = pack_codes(codes.to(draws.device), bits)
    is_lookup, has_zeros = axes["coding"] == "lookup", axes["coding"] == "uniform" and not axes["symmetric"]
    weight = QuantizedWeight(
        packed,
        None if is_lookup else scales.to(dtype),
        zeros.to(torch.int16) if has_zeros else None,
        bits,
        group_size,
        high=high,
        table=table.to(dtype) if is_lookup else None,
        permutation=torch.where(permutation < inputs, permutation, -1).int() if axes["permuted"] else None,
        outliers=_drawn_outliers(draws, outputs, inputs, dtype, unit) if axes["sparse"] else None,
        inputs=inputs,
        e2m1=is_e2m1,
    )
    return weight.to(draws.device)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, outputs, inputs = int(axes["M"]), int(axes["N"]), int(axes["K"])
    dtype = dtype_of(axes["activation"])
    weight = draw_weight(axes, draws)
    if axes["order"] == "interleaved":
        weight = interleaved(weight)

    # Another for each part: one's stride taken for another's, which is as wide, must show. Of whole 16 bytes, so that
    # rows of 8 outputs begin on 16 bytes in both layouts, and those of 13 in neither.
    paddings = count(8, 8)

    def laid_out(part: torch.Tensor) -> torch.Tensor:
        if part.dim() == 1:
            return draws.laid_out(part)
        return draws.laid_out(part, axes["weight_layout"], padding=next(paddings))

    weight = weight.map_tensors(laid_out)
    x = draws.laid_out(draws.normal((tokens, inputs), dtype, axes["values"]), axes["layout"])
    # Of the product's size: a GEMM that starts its sum from a far larger bias loses the product's own digits.
    bias = draws.laid_out(draws.normal((outputs,), dtype, axes["values"])) if axes["bias"] else None
    return {"x": x, "weight": weight, "bias": bias}


def bytes_moved(case: Case) -> int:
    x, weight, bias = (case.inputs[name] for name in ("x", "weight", "bias"))
    elements = x.shape[0] * sum(weight.shape) + (bias.numel() if bias is not None else 0)
    return int(elements * x.element_size() + weight.nbytes)


_PADDINGS = (0, 3, 11, 24, 27, 56)
_INPUTS = (8, 64, 37, 72, 136, 256)
_WIDE_INPUTS = (640,)


def _group_sizes(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """All places of these inputs, for a lookup has one group, where they are words of 4 codes; and usual groups."""
    places = {inputs + padding for inputs in sizes for padding in _PADDINGS}
    return tuple(sorted({16, 32, 128, *(count for count in places if count % 4 == 0)}))


_ROW = "(32 if bits == 3 else 32 // bits)"  # the places that whole words stand for: codes_per_row

# Qwen3-4B's qkv, attention output, gate-up and down projections, and the square of the published figures.
_SHAPES = ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (8192, 8192))
_SQUARE = _SHAPES[-1]


def _benchmark(tokens: int, outputs: int, inputs: int, group_size: int = 128, **kind: Value) -> dict[str, Value]:
    plain: dict[str, Value] = {"bits": 4, "coding": "uniform", "permuted": False, "sparse": False, "symmetric": False}
    sizes = {"M": tokens, "N": outputs, "K": inputs, "padding": 0, "group_size": group_size}
    dtypes = {"activation": "bfloat16", "weight": "bfloat16"}
    return {**plain, **kind, **sizes, **dtypes, "bias": False}


def _benchmarks() -> dict[str, dict[str, Value]]:
    """The ordinary weight first and last, which are the points that stand for all where one is enough."""
    plain = {
        f"M={tokens},N={outputs},K={inputs},g=128": _benchmark(tokens, outputs, inputs)
        for tokens in (1, 16, 64, 128, 2048)
        for outputs, inputs in _SHAPES
    }
    other: dict[str, dict[str, Value]] = {}
    for tokens in (1, 16, 2048):
        square = f"M={tokens},N={_SQUARE[0]},K={_SQUARE[1]}"
        for bits in (2, 3, 8):
            other[f"{square},g=128,bits={bits}"] = _benchmark(tokens, *_SQUARE, bits=bits)
        other[f"{square},g=128,permuted"] = _benchmark(tokens, *_SQUARE, permuted=True)
        for bits in (3, 4):
            lookup = _benchmark(tokens, *_SQUARE, _SQUARE[1], bits=bits, coding="lookup", sparse=True)
            other[f"{square},lookup,bits={bits},sparse"] = lookup
    first = next(iter(plain))
    return {first: plain[first], **other, **plain}


def _corners() -> dict[str, dict[str, Value]]:
    """Weights that are rare among the draws, each with code of its own in the kernels; of any coding."""
    one: dict[str, Value] = {"M": 1, "weight_layout": "padded"}
    widths = {f"bits{bits}": {**one, "bits": bits} for bits in (2, 3, 8)}
    kinds = {kind: {**one, kind: True} for kind in ("permuted", "sparse")}
    # One table for thousands of inputs: their number is not drawn alone, for it is the size of the table's group too.
    long: dict[str, Value] = {
        **one,
        "bits": 4,
        "coding": "lookup",
        "permuted": False,
        "sparse": False,
        "N": 8,
        "padding": 0,
    }
    # The most tokens whose tiles unpack as they go.
    most_tiled: dict[str, Value] = {"M": 511, "N": 32, "K": 128}
    return widths | kinds | {"long_lookup": {**long, "K": 8320, "group_size": 8320}, "most_tiled": most_tiled}


CONTRACT = Contract(
    name="dequant_gemm",
    reference=reference,
    baseline=baseline,
    # Values that are listed again are likelier draws. The ordinary weight comes last, interleaved: compiling ahead of
    # time takes the last draw, and that one every variant but those of lookups supports.
    axes=(
        Int("M", 0, 2**31 - 1, (0, 2, 3, 17, 33, 1), "tokens", batch=True, wide=(1, 16), classes=ROW_CLASSES),
        Int("N", 1, 2**24, (13, 8, 16, 40, 72), "output features", wide=(136,)),
        Choice("bits", (8, 3, 2, 4, 4, 4, 4, 4), "of a code"),
        Choice(
            "coding",
            ("lookup", "uniform", "uniform", "uniform"),
            "what a code stands for: a step of its group's scale, or an entry of a table",
        ),
        Choice("permuted", (True, False, False, False), "whether codes lie in another order than inputs"),
        Choice("sparse", (True, False, False, False), "whether some weights are kept beside the codes"),
        Int("K", 1, 2**24, _INPUTS, "input features", wide=_WIDE_INPUTS),
        Int("padding", 0, 2**24, _PADDINGS, "places of a permutation that are no input"),
        Int(
            "group_size",
            4,
            2**24,
            _group_sizes(_INPUTS),
            "places that share a scale; all, in a lookup",
            wide=_group_sizes(_WIDE_INPUTS),
        ),
        dtype_axis("activation"),
        dtype_axis("weight"),
        Choice("symmetric", (False, True), "whether zero-points are all in the middle and not stored"),
        Choice("order", ORDERS, "of the codes in a word: a checkpoint's, or as `prepare` makes it"),
        Choice("bias", (False, True)),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of the weight's parts"),
        Choice("values", KINDS),
    ),
    constraints=(
        Constraint(f"permuted or K % {_ROW} == 0"),
        Constraint("permuted or padding == 0"),
        Constraint(f"(K + padding) % {_ROW} == 0"),
        Constraint(f"group_size % {_ROW} == 0"),
        Constraint("(K + padding) % group_size == 0"),
        Constraint("coding == 'uniform' or group_size == K + padding"),
        Constraint("coding == 'uniform' or not symmetric"),
        Constraint("weight == activation"),
    ),
    arguments={
        "x": Tensor("M K", "activation"),
        "weight": QuantizedWeightArgument(),
        "bias": Tensor("N", "activation", optional=True),
    },
    outputs={"out": Output("M N", "activation")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=matmul.flops,
    default="auto",
    benchmarks=_benchmarks(),
    inspected={
        **{f"bits{bits}": {"bits": bits, "coding": "uniform"} for bits in (2, 3, 8)},
        "permuted": {"permuted": True},
        **{f"lookup{bits}": {"bits": bits, "coding": "lookup"} for bits in (3, 4)},
    },
    loaded={"order": ORDERS[0]},
    corners=_corners(),
    batching=row_batching("x"),
    work="gemm",
)
