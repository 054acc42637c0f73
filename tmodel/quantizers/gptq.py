"""GPTQ rounds weights one input after another, and lets the inputs that follow make up for the error so far.

Source: Frantar et al., 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1. Its reference code also orders inputs by activation, finds a group's steps when it reaches the group, and
can search for narrower ones. Groups in the order of activation: Gafni et al., 2025, "Dual Precision Quantization for
Efficient and Accurate Deep Neural Networks Inference". What the one walk chose is then improved, see `descent`.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import Field

from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel.formats import GPTQ
from tmodel.formats.gptq import CheckpointFormat
from tmodel.quantizers.calibration import collect_inputs, forward
from tmodel.quantizers.descent import block_of, descend
from tmodel.quantizers.method import Layer, Method, Options, QuantizedLayer
from tmodel.quantizers.rtn import compute_steps, pack_weight, round_to_codes, search_steps

ActOrder = Literal["inputs", "groups", "none"]

DAMPING = 0.05
"""The share of the Hessian's mean diagonal that is added to the diagonal: GPTQModel's. With the paper's, 0.01, three
small trained models had 9 to 18% more KL divergence at 2 bits, from 5% less to 1% more at 3, and 2 to 13% less at 4."""


class GPTQOptions(Options):
    """What GPTQ may be told.

    Attributes:
        damping: The share of the mean second moment that is added to each input's.
        act_order: What the largest moments put first: "inputs", whose neighbours in the new order share a step, so that
            a checkpoint says the group of each (desc_act); "groups" of neighbours as they are, and within each its
            inputs, which a checkpoint does not show; or "none".
        search: Whether each group's range is narrowed where that loses less, see rtn.search_steps.
        sweeps: How often all codes and steps are then chosen anew, see `descent`.
        symmetric: Whether every zero-point is 2**(bits - 1).
        checkpoint_format: "gptq" (v1), which every reader knows, or "gptq_v2", whose zero-points may be 0.
    """

    damping: float = Field(default=DAMPING, gt=0, le=1)
    act_order: ActOrder = "inputs"
    search: bool = True
    sweeps: int = Field(default=2, ge=0)
    symmetric: bool = False
    checkpoint_format: CheckpointFormat = "gptq"


def gptq(
    weight: torch.Tensor,
    second_moment: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: ActOrder = "inputs",
    damping: float = DAMPING,
    search: bool = False,
    sweeps: int = 0,
    lowest_zero: int = 0,
) -> QuantizedWeight:
    """Chooses codes that keep X W^T, not W, near its dense value.

    Untold this is the paper's walk: with an identity for a second moment and no act_order it rounds to nearest.

    Args:
        weight: [N, K], float32 or float64.
        second_moment: X^T X, [K, K], of the inputs seen.
        bits: Of a code.
        group_size: Inputs that share a step; -1 is all.
        symmetric: As in GPTQOptions, as the four after it.
        act_order: What goes first, while most weights are left to make up for it. With "inputs" the result has a
            permutation.
        damping: More of it trusts the second moment less.
        search: Whether ranges of groups are narrowed.
        sweeps: How often codes and steps are chosen anew.
        lowest_zero: No zero-point is below it, see rtn.compute_steps.

    Returns:
        The weight in codes.

    Raises:
        ValueError: The second moment is not positive semidefinite, or not finite.
    """
    outputs, inputs = weight.shape
    size = inputs if group_size == -1 else group_size
    moment = second_moment.double()
    dead = moment.diagonal() == 0  # these inputs were always 0, so their weights do nothing
    moment = moment + torch.diag(dead.double())
    order = order_inputs(second_moment.double().diagonal(), size, act_order)
    columns = weight.t().masked_fill(dead[:, None], 0)[order]  # [K, N]
    damped, inverse = (part.to(weight.dtype) for part in _damp_and_invert(moment[order][:, order], damping))  # [K, K]
    dense, codes = columns.clone(), torch.empty_like(columns)
    steps, zero_points = [], []
    # A block ends where a group begins: the group's step depends on all corrections from inputs before it.
    block = block_of(size)
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        if start % size == 0:
            group = slice(start, start + size)
            # An error of a column costs its square over the square of its pivot, whatever follows it.
            costs = inverse.diagonal()[group, None].square().reciprocal() if search else None
            step, zeros = _choose_steps(columns[group], costs, bits, symmetric=symmetric, lowest_zero=lowest_zero)
            steps.append(step)
            zero_points.append(zeros)
        errors = torch.empty((stop - start, outputs), dtype=weight.dtype)
        for place in range(start, stop):
            column = columns[place]
            codes[place] = round_to_codes(column, step[0], zeros[0], bits)
            errors[place - start] = (column - (codes[place] - zeros[0]) * step[0]) / inverse[place, place]
            rest = inverse[place, place + 1 : stop]
            columns[place + 1 : stop] -= rest[:, None] * errors[place - start]
        columns[stop:] -= inverse[start:stop, stop:].t() @ errors
    codes, step = descend(dense, codes, torch.cat(steps), torch.cat(zero_points), damped, bits, sweeps)
    # Groups of inputs that were not neighbours are numbered as they came, others as they lie.
    numbers = torch.arange(inputs // size) if act_order == "inputs" else order[::size] // size
    group_of = torch.empty_like(order)
    group_of[order] = numbers.repeat_interleave(size)
    # Within a group inputs keep their order, because a file stores only the group of each.
    places = group_of.argsort(stable=True)
    by_input = torch.empty_like(codes)
    by_input[order] = codes
    permutation = None if torch.equal(places, torch.arange(inputs)) else places.int()
    by_number = numbers.argsort()
    return pack_weight(
        by_input[places], step[by_number], torch.cat(zero_points)[by_number], bits, size,
        symmetric=symmetric, permutation=permutation,
    )  # fmt: skip


def order_inputs(moments: torch.Tensor, group_size: int, act_order: ActOrder) -> torch.Tensor:
    """[K] int64: the inputs in the order in which they are rounded.

    Args:
        moments: [K], the second moment of each.
        group_size: Inputs that share a step.
        act_order: As in GPTQOptions; a group counts by its largest moment.
    """
    if act_order == "inputs":
        return moments.argsort(descending=True, stable=True)
    if act_order == "none":
        return torch.arange(len(moments))
    groups = moments.unflatten(0, (-1, group_size))  # [G, size]
    first = groups.amax(1).argsort(descending=True, stable=True)  # [G]
    within = groups.argsort(dim=1, descending=True, stable=True)  # [G, size]
    return (first[:, None] * group_size + within[first]).flatten()


def _choose_steps(
    group: torch.Tensor, costs: torch.Tensor | None, bits: int, *, symmetric: bool, lowest_zero: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step and zero-point [1, N] of a group [size, N]; searched for where errors have `costs` [size, 1]."""
    if costs is None:
        return compute_steps(group, bits, symmetric=symmetric, lowest_zero=lowest_zero)
    return search_steps(group, costs, bits, symmetric=symmetric, lowest_zero=lowest_zero)


def _damp_and_invert(moment: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the damped `moment`, U upper triangular with U^T U its inverse), [K, K] each; damping grows until U exists."""
    mean = moment.diagonal().mean()
    while True:
        damped = moment + torch.eye(len(moment), dtype=moment.dtype) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return damped, upper
        if damping >= 1:  # every eigenvalue is at least the mean diagonal here, so only bad input fails
            raise ValueError("gptq: the second moment of the inputs is not positive semidefinite, or not finite")
        damping = min(1.0, damping * 10)


def quantize(options: GPTQOptions, layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Quantizes one group of linears after another, each on inputs from the quantized groups before it.

    The next layer's inputs come from this layer's quantized weights. Format v1 cannot store a zero-point of 0.
    """
    layers, hidden = layer.require_calibration()
    weights = dict(layer.weights)
    linears: dict[str, QuantizedWeight] = {}
    lowest_zero = 1 if options.checkpoint_format == "gptq" else 0
    told = options.model_dump(exclude={"checkpoint_format"})
    for place, group in enumerate(layer.groups):
        moment = collect_inputs(layers, weights, layer.index, hidden, [place])[place].second_moment
        for name in group.names:
            weight = weights[f"{name}.weight"]
            linears[name] = gptq(weight, moment, bits, group_size, lowest_zero=lowest_zero, **told)
            weights[f"{name}.weight"] = dequantize(linears[name], torch.float32)
    return QuantizedLayer(linears, carry=forward(layers, weights, layer.index, hidden))


def _format(options: GPTQOptions, bits: int, group_size: int) -> GPTQ:
    return GPTQ(
        bits=bits,
        group_size=group_size,
        desc_act=options.act_order == "inputs",
        sym=options.symmetric,
        checkpoint_format=options.checkpoint_format,
    )


def make_method(options: GPTQOptions) -> Method:
    """GPTQ that is told `options`."""
    return Method(
        "gptq", (2, 3, 4, 8), partial(_format, options), grouped=True, walk="forward",
        quantize=partial(quantize, options), options=options, configure=make_method,
    )  # fmt: skip


METHOD = make_method(GPTQOptions())
