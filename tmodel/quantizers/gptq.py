"""GPTQ rounds weights one input after another, and lets the inputs that follow make up for the error so far.

Source: Frantar et al., 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1. Its reference code also orders inputs by activation and finds a group's steps when it reaches the group.
"""

from __future__ import annotations

import torch

from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel.formats import GPTQ
from tmodel.quantizers.calibration import collect_inputs, forward
from tmodel.quantizers.method import Layer, Method, QuantizedLayer
from tmodel.quantizers.rtn import compute_steps, pack_weight, round_to_codes

DAMPING = 0.01
"""The share of the Hessian's mean diagonal that is added to the diagonal: the paper's."""

_BLOCK = 128


def gptq(
    weight: torch.Tensor,
    second_moment: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    act_order: bool = True,
    lowest_zero: int = 0,
) -> QuantizedWeight:
    """Chooses codes that keep X W^T, not W, near its dense value.

    With an identity for a second moment and no act_order the codes are those of round-to-nearest.

    Args:
        weight: [N, K], float32 or float64.
        second_moment: X^T X, [K, K], of the inputs seen.
        bits: Of a code.
        group_size: Inputs that share a step; -1 is all.
        symmetric: Every zero-point is 2**(bits - 1).
        act_order: The inputs with the largest moments go first, while most weights are left to make up for them.
            Neighbours in this order share a group, so the result has a permutation.
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
    columns = weight.t().masked_fill(dead[:, None], 0)  # [K, N]
    order = torch.arange(inputs)
    if act_order:
        order = moment.diagonal().argsort(descending=True, stable=True)
        moment, columns = moment[order][:, order], columns[order]
    else:
        columns = columns.clone()
    inverse = _inverse_factor(moment).to(weight.dtype)  # [K, K], upper triangular
    codes = torch.empty_like(columns)
    steps, zero_points = [], []
    # A block ends where a group begins: the group's step depends on all corrections from inputs before it.
    block = max(length for length in range(1, _BLOCK + 1) if size % length == 0)
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        if start % size == 0:
            step, zeros = compute_steps(
                columns[start : start + size], bits, symmetric=symmetric, lowest_zero=lowest_zero
            )
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
    # Within a group inputs keep their order, because a file stores only the group of each.
    group_of = torch.empty_like(order)
    group_of[order] = torch.arange(inputs) // size
    places = group_of.argsort(stable=True)
    by_input = torch.empty_like(codes)
    by_input[order] = codes
    permutation = None if torch.equal(places, torch.arange(inputs)) else places.int()
    return pack_weight(
        by_input[places], torch.cat(steps), torch.cat(zero_points), bits, size, symmetric=symmetric,
        permutation=permutation,
    )  # fmt: skip


def _inverse_factor(moment: torch.Tensor) -> torch.Tensor:
    """U [K, K], upper triangular, with U^T U the inverse of the damped `moment`; damping grows until it exists."""
    mean = moment.diagonal().mean()
    damping = DAMPING
    while True:
        damped = moment + torch.eye(len(moment), dtype=moment.dtype) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        if damping >= 1:  # every eigenvalue is at least the mean diagonal here, so only bad input fails
            raise ValueError("gptq: the second moment of the inputs is not positive semidefinite, or not finite")
        damping *= 10


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """Quantizes one group of linears after another, each on inputs from the quantized groups before it.

    The next layer's inputs come from this layer's quantized weights. No zero-point is 0: format v1 cannot store it.
    """
    layers, hidden = layer.require_calibration()
    weights = dict(layer.weights)
    linears: dict[str, QuantizedWeight] = {}
    for place, group in enumerate(layer.groups):
        moment = collect_inputs(layers, weights, layer.index, hidden, [place])[place].second_moment
        for name in group.names:
            linears[name] = gptq(weights[f"{name}.weight"], moment, bits, group_size, lowest_zero=1)
            weights[f"{name}.weight"] = dequantize(linears[name], torch.float32)
    return QuantizedLayer(linears, carry=forward(layers, weights, layer.index, hidden))


def _format(bits: int, group_size: int) -> GPTQ:
    """Format v1, which every reader of GPTQ knows; v2 is GPTQModel's and newer."""
    return GPTQ(bits=bits, group_size=group_size, desc_act=True, sym=False)


METHOD = Method("gptq", (2, 3, 4, 8), _format, grouped=True, walk="forward", quantize=quantize)
