"""grouped_matmul: each pair of token and choice multiplies its token's row with the weight of its expert."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, lay_out_like
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, Value, dtype_axis
from tkernels.inputs import KINDS, LAYOUTS, Draws, dtype_of
from tkernels.ops.dequant_gemm.contract import draw_weight
from tkernels.ops.experts import ROUTINGS, TILES_DIM, distinct_experts, draw_experts, layout_of_weights, tile_of_pairs
from tkernels.ops.grouped_matmul._argument import (
    BITS,
    CODING,
    DENSE_BITS,
    ORDER,
    ExpertsOfRows,
    ExpertWeights,
    Weight,
    coding_axes,
    coding_rules,
)
from tkernels.ops.scaled_matmul.contract import FP8_SPREAD, draw_codes
from tkernels.ops.served_models import SERVED_MIXTURES
from tkernels.ops.sort_by_expert import contract as sort_by_expert
from tkernels.quantized.codes import ORDERS
from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.stacked import (
    StackedWeight,
    dequantize_expert,
    dequantize_experts,
    interleaved_experts,
    stack,
)
from tkernels.quantized.stacked_scaled import StackedScaledWeight
from tkernels.quantized.weight import QuantizedWeight


def reference(
    x: torch.Tensor,
    weight: Weight,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    combine: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[p] = weight[e] @ x[p * X // (T K)] + bias[e] for token t, e = experts[t, k] and pair p = t K + k.

    So x has a row for each token, or one for each pair: what the first product of an expert made.

    Args:
        x: [X, C] with X = T or X = T * K, any float dtype, free row stride.
        weight: [E, N, C], as x, free strides but the last; or a StackedWeight or StackedScaledWeight of E experts, N
            outputs and C inputs.
        experts: [T, K] int32 in [-1, E), free row stride; -1: the pair is left out.
        order, starts, tile_expert, tile_start: What sort_by_expert makes of `experts` with this `tile`, contiguous.
            They say nothing that `experts` does not: they are how the work is cut.
        tile: Pairs of one expert that are multiplied at once: 16, 32, 64 or 128.
        bias: [E, N], as x.
        combine: [T, K] float32, free row stride: what each pair counts. The K results of a token are then one, the sum
            over k of combine[t, k] * out[t K + k] in the order of k, rounded once; pairs that are left out are no part
            of it.

    Returns:
        out [T K, N], as x, where rows of pairs that are left out stay untouched; with `combine` [T, N].

    Source: the grouped products of MegaBlocks (Gale et al., 2023), with the gather and the scatter of ScatterMoE (Tan
    et al., 2024).
    """
    dense = weight if isinstance(weight, torch.Tensor) else dequantize_experts(weight, x.dtype)
    choices = experts.flatten()  # [T K]
    out = x.new_full((choices.numel(), dense.shape[1]), torch.nan)
    for expert in range(dense.shape[0]):
        pairs = (choices == expert).nonzero().squeeze(1)
        own = x[_row_of(pairs, x, choices)] @ dense[expert].t()
        out[pairs] = own if bias is None else own + bias[expert]
    return out if combine is None else _combined(out, experts, combine)


def _row_of(pairs: torch.Tensor, x: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """The row of x that each pair multiplies."""
    return pairs // (choices.numel() // max(x.shape[0], 1) or 1)


def _combined(pairs: torch.Tensor, experts: torch.Tensor, combine: torch.Tensor) -> torch.Tensor:
    """[T K, N] -> [T, N]: the weighted sum over a token's choices, in their order, rounded once."""
    wide = torch.promote_types(pairs.dtype, torch.float32)
    sums = torch.zeros((experts.shape[0], pairs.shape[1]), dtype=wide, device=pairs.device)
    for choice in range(experts.shape[1]):
        own = pairs[choice :: experts.shape[1]].to(wide) * combine[:, choice, None].to(wide)
        sums += torch.where(experts[:, choice, None] >= 0, own, 0)
    return sums.to(pairs.dtype)


def baseline(
    x: torch.Tensor,
    weight: Weight,
    experts: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    tile: int,
    tile_expert: torch.Tensor,
    tile_start: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    combine: torch.Tensor | None = None,
) -> torch.Tensor:
    """On a CPU a product for each expert that has pairs; elsewhere torch's grouped product, and no host waits."""
    choices, outputs = experts.numel(), weight.shape[1]
    out = x.new_full((choices + 1, outputs), torch.nan)  # the last one is for pairs that are left out
    if x.is_cpu:
        ends = starts.tolist()
        for expert, (start, end) in enumerate(pairwise(ends)):
            if start < end:
                pairs = order[start:end].long()
                own = x[_row_of(pairs, x, experts)] @ _expert_of(weight, expert, x.dtype).t()
                out[pairs] = own if bias is None else own.add_(bias[expert])
    else:
        dense = weight if isinstance(weight, torch.Tensor) else dequantize_experts(weight, x.dtype)
        pairs = torch.where(order < 0, choices, order).long()
        rows = _row_of(pairs.clamp(max=choices - 1), x, experts)
        own = torch._grouped_mm(x[rows], dense.transpose(1, 2), offs=starts[1:])  # [T K, N]
        if bias is not None:
            places = torch.arange(choices, dtype=starts.dtype, device=x.device)
            of = torch.searchsorted(starts[1:], places, right=True).clamp(max=dense.shape[0] - 1)
            own += bias[of]
        out.index_copy_(0, pairs, own)
    return out[:choices] if combine is None else _combined(out[:choices], experts, combine)


def _expert_of(weight: Weight, expert: int, dtype: torch.dtype) -> torch.Tensor:
    return weight[expert] if isinstance(weight, torch.Tensor) else dequantize_expert(weight, expert, dtype)


_DRAWN_EXPERTS = 8
"""Experts that codes are drawn for; those of 128 would take a core half a minute."""


def _turned(weight: QuantizedWeight, turns: int) -> QuantizedWeight:
    """A further expert's weight: the same outputs, each so many places on."""
    if not turns:
        return weight
    by_output: dict[str, Any] = {name: part for name, part in weight.own_parts() if name != "permutation"}
    return replace(weight, **{name: part.roll(turns, -1) for name, part in by_output.items()})


def draw_experts_weight(
    axes: Axes, draws: Draws, shape: tuple[int, int, int], prefix: str = ""
) -> StackedWeight | StackedScaledWeight:
    """Codes for all experts [E, N, C] as the axes of one weight say (`prefix`: see ExpertWeights)."""
    # Another padding for each part: one's stride taken for another's, which is as wide, must show.
    paddings = count(8, 8)
    drawn = _drawn_e4m3(draws, shape) if axes["coding"] == "e4m3" else _drawn_words(axes, draws, shape, prefix)
    return drawn.map_tensors(lambda part: draws.laid_out(part, axes["weight_layout"], padding=next(paddings)))


def _drawn_e4m3(draws: Draws, shape: tuple[int, int, int]) -> StackedScaledWeight:
    """Values such that outputs are of x's size whatever C is."""
    experts, outputs, inputs = shape
    values = draw_codes((experts * outputs, inputs), torch.float8_e4m3fn, "ordinary", draws).view(shape)
    scales = draws.normal((experts, -(-outputs // BLOCK), inputs // BLOCK), torch.float32).abs() + 0.1
    return StackedScaledWeight(values, scales / (FP8_SPREAD * inputs**0.5))


def _drawn_words(axes: Axes, draws: Draws, shape: tuple[int, int, int], prefix: str) -> StackedWeight:
    experts, outputs, inputs = shape
    own = {name: axes[f"{prefix}{name}"] for name in ("padding", "group_size", "symmetric", "permuted")}
    shared = {"bits": axes["bits"], "coding": axes["coding"], "weight": axes["weight"], "sparse": False}
    point = {"N": outputs, "K": inputs, **shared, **own}
    drawn = [draw_weight(point, draws) for _ in range(min(experts, _DRAWN_EXPERTS))]
    weight = stack([_turned(drawn[e % len(drawn)], e // len(drawn)) for e in range(experts)], experts)
    return interleaved_experts(weight) if axes["order"] == "interleaved" else weight


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, top_k, experts, outputs, inputs = (int(axes[name]) for name in ("T", "K", "E", "N", "C"))
    dtype, rows = dtype_of(axes["activation"]), tokens * (top_k if axes["per_pair"] else 1)
    if axes["bits"] == DENSE_BITS:
        x, dense = draws.product_operands(rows, experts * outputs, inputs, axes["values"])
        weight: Weight = draws.laid_out(dense.view(experts, outputs, inputs).to(dtype), axes["weight_layout"])
    else:
        x = draws.normal((rows, inputs), torch.float64, axes["values"])
        weight = draw_experts_weight(axes, draws, (experts, outputs, inputs))
    chosen = draw_experts(draws, tokens, top_k, experts, str(axes["routing"]), dropped=bool(axes["dropped"]))
    tile = int(axes["tile"])
    bias = draws.normal((experts, outputs), dtype, axes["values"]) if axes["bias"] else None
    combine = draws.normal((tokens, top_k), torch.float32).abs() if axes["combine"] else None
    return {
        "x": draws.laid_out(x.to(dtype), axes["layout"]),
        "weight": weight,
        "experts": draws.laid_out(chosen, axes["layout"]),
        **_sorted(chosen, experts, tile, draws),
        "bias": None if bias is None else draws.laid_out(bias, axes["layout"]),
        "combine": None if combine is None else draws.laid_out(combine, layout_of_weights(str(axes["layout"]), seed)),
    }


def _sorted(experts: torch.Tensor, num_experts: int, tile: int, draws: Draws | None = None) -> dict[str, Any]:
    parts = sort_by_expert.reference(experts, num_experts, tile)
    order, starts, tile_expert, tile_start = parts if draws is None else map(draws.laid_out, parts)
    return {"order": order, "starts": starts, "tile": tile, "tile_expert": tile_expert, "tile_start": tile_start}


def bytes_moved(case: Case) -> int:
    """The weights of the distinct experts, x, the result, and the routing."""
    x, weight, experts, order, bias, combine = (
        case.inputs[name] for name in ("x", "weight", "experts", "order", "bias", "combine")
    )
    of_one = weight.nbytes // weight.shape[0] + (0 if bias is None else weight.shape[1] * x.element_size())
    rows = experts.shape[0] if combine is not None else int((experts >= 0).sum())
    floats = (x.numel() + rows * weight.shape[1]) * x.element_size()
    integers = 4 * (order.numel() + 2 * case.inputs["tile_expert"].numel() + weight.shape[0] + 1)
    return int(
        distinct_experts(experts) * of_one + floats + integers + (4 * experts.numel() if combine is not None else 0)
    )


def flops(case: Case) -> int:
    _, outputs, inputs = case.inputs["weight"].shape
    return 2 * int((case.inputs["experts"] >= 0).sum()) * int(outputs) * int(inputs)


def _count(inputs: Inputs) -> int:
    return int(inputs["experts"].shape[0])


def _take(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    """The picked tokens, sorted anew."""
    x, experts, combine = inputs["x"], inputs["experts"], inputs["combine"]
    tokens = torch.tensor(picks, dtype=torch.long, device=experts.device)
    each = x.shape[0] // max(experts.shape[0], 1)
    rows = (tokens[:, None] * each + torch.arange(each, device=tokens.device)).flatten()
    taken = {**inputs, "x": lay_out_like(x[rows], x), "experts": lay_out_like(experts[tokens], experts)}
    if combine is not None:
        taken["combine"] = lay_out_like(combine[tokens], combine)
    for name, made in _sorted(taken["experts"], inputs["weight"].shape[0], inputs["tile"]).items():
        taken[name] = lay_out_like(made, inputs[name]) if isinstance(made, torch.Tensor) else made
    return taken


def _part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    if inputs["combine"] is not None:
        return {"out": results["out"][member]}
    experts = inputs["experts"]
    first = member * experts.shape[1]
    return {"out": results["out"][first : first + experts.shape[1]][experts[member] >= 0]}


TOKEN_CLASSES = (1, 8, 64, 512)
"""The largest numbers of tokens between which another tile of experts' products may be the best."""


def _benchmark(
    tokens: int, sizes: tuple[int, int, int, int], down: bool, bits: int = DENSE_BITS, coding: str = "uniform"
) -> dict[str, Value]:
    experts, top_k, hidden, width = sizes
    tile = tile_of_pairs(tokens * top_k, experts)
    point: dict[str, Value] = {
        "T": tokens,
        "K": top_k,
        "E": experts,
        "per_pair": down,
        "tile": tile,
    }
    point |= {"N": hidden, "C": width} if down else {"N": 2 * width, "C": hidden}
    point |= {
        "bits": bits,
        "coding": coding,
        "group_size": 128 if bits else 0,
        "padding": 0,
        "symmetric": True,
        "permuted": False,
    }
    dtypes: dict[str, Value] = {"activation": "bfloat16", "weight": "bfloat16"}
    return point | dtypes | {"bias": False, "combine": down, "routing": "uniform", "dropped": False}


def _benchmarks() -> dict[str, dict[str, Value]]:
    """The dense ones last, as the last is the typical one."""
    qwen3, ways = SERVED_MIXTURES["Qwen3-30B-A3B"], {"down": True, "up": False}
    rare: dict[str, dict[str, Value]] = {"W3,permuted": {"bits": 3, "permuted": True}, "W8": {"bits": 8}}
    points = {f"T=64,Qwen3-30B-A3B,up,{name}": _benchmark(64, qwen3, False, 4) | more for name, more in rare.items()}
    floats: dict[str, Value] = {"coding": "e2m1", "group_size": 32, "bias": True}
    for tokens in (1, 8, 64, 512, 4096):
        if tokens != 8:
            for way, down in ways.items():
                published = _benchmark(tokens, SERVED_MIXTURES["gpt-oss-20b"], down, 4) | floats
                points[f"T={tokens},gpt-oss-20b,{way},MXFP4"] = published
                points[f"T={tokens},Mixtral-8x7B,{way}"] = _benchmark(tokens, SERVED_MIXTURES["Mixtral-8x7B"], down)
        for bits, coding, name in ((4, "uniform", ",W4"), (8, "e4m3", ",FP8"), (DENSE_BITS, "uniform", "")):
            for way, down in ways.items():
                points[f"T={tokens},Qwen3-30B-A3B,{way}{name}"] = _benchmark(tokens, qwen3, down, bits, coding)
    return points


CONTRACT = Contract(
    name="grouped_matmul",
    reference=reference,
    baseline=baseline,
    # Values that are listed again are likelier draws.
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 9, 20), "tokens", batch=True, wide=(6,), classes=TOKEN_CLASSES),
        Int("K", 1, 64, (1, 2, 4), "experts of a token"),
        Int("E", 1, 2**12, (4, 5, 8, 1), "experts"),
        Choice("per_pair", (False, True), "whether x has a row for each pair, not for each token"),
        Int("N", 1, 2**24, (13, 8, 16, 40), "output features", wide=(136,)),
        BITS,
        CODING,
        *coding_axes(Int("C", 1, 2**24, (8, 64, 37, 128, 72, 136), "input features", wide=(640,))),
        ORDER,
        dtype_axis("activation"),
        dtype_axis("weight"),
        Int("tile", 16, 128, (16, 32, 64), "pairs of a tile"),
        Choice("bias", (False, True)),
        Choice("combine", (False, True), "whether a token's results are one"),
        Choice("dropped", (False, True), "whether some pairs have no expert"),
        Choice("routing", ROUTINGS),
        Choice("layout", LAYOUTS, "of x"),
        Choice("weight_layout", LAYOUTS, "of the weights"),
        Choice("values", KINDS),
    ),
    constraints=(
        Constraint("K <= E"),
        Constraint("T * K < 2**31"),
        Constraint("not per_pair or T * (K - 1) > 0"),
        Constraint("tile & (tile - 1) == 0"),
        *coding_rules("C"),
        Constraint("weight == activation"),
    ),
    arguments={
        "x": Tensor("X C", "activation", read_wide=True),
        "weight": ExpertWeights("E N C"),
        "experts": ExpertsOfRows(),
        "order": Tensor("T*K", "int32"),
        "starts": Tensor("E+1", "int32"),
        "tile": Scalar(int, axis=True, low=1),
        "tile_expert": Tensor(TILES_DIM, "int32"),
        "tile_start": Tensor(TILES_DIM, "int32"),
        "bias": Tensor("E N", "activation", optional=True),
        "combine": Tensor("T K", "float32", optional=True),
    },
    outputs={"out": Output("T*K**(1-combine) N", "activation")},  # a row for each pair, or for each token
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="auto",
    benchmarks=_benchmarks(),
    inspected={
        "bits3": {"bits": 3},
        "bits8": {"bits": 8, "coding": "uniform"},
        "e2m1": {"coding": "e2m1"},
    },
    loaded={"order": ORDERS[0]},
    batching=Batching(_count, _take, _part),
    work="gemm",
)
