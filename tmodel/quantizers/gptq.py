"""GPTQ: weights are rounded one input after another, and those still to come make up for the error so far.

Source: Frantar et al., 2023, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
algorithm 1; the order by activation and the groups' steps taken as the columns come are those of its reference code.
"""

from __future__ import annotations

import torch

from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel.formats import GPTQ
from tmodel.quantizers.calibration import collect_inputs, forward
from tmodel.quantizers.method import Layer, Method, QuantizedLayer
from tmodel.quantizers.rtn import codes_for, fit, packed

DAMPING = 0.01
"""Of the Hessian's mean diagonal, added to all of it: the paper's."""

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
    """Codes for `weight` [N, K] that keep X W^T, not W, near what it was.

    Args:
        weight: [N, K], float32 or float64.
        second_moment: X^T X, [K, K], of the inputs seen.
        bits, group_size, symmetric, lowest_zero: as for round-to-nearest.
        act_order: the inputs with the largest moments go first, when the most weights are left to make up for them, and
            those next to one another in this order share a group: the result has a permutation.

    Returns:
        With an identity for a second moment and no act_order, round-to-nearest's codes.
    """
    outputs, inputs = weight.shape
    size = inputs if group_size == -1 else group_size
    moment = second_moment.double()
    dead = moment.diagonal() == 0  # inputs that were never anything but 0, whose weights do nothing
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
    # A block ends where a group begins: a group's step is found when all that came before has had its say.
    block = max(length for length in range(1, _BLOCK + 1) if size % length == 0)
    for start in range(0, inputs, block):
        stop = min(start + block, inputs)
        if start % size == 0:
            step, zeros = fit(columns[start : start + size], bits, symmetric=symmetric, lowest_zero=lowest_zero)
            steps.append(step)
            zero_points.append(zeros)
        errors = torch.empty((stop - start, outputs), dtype=weight.dtype)
        for place in range(start, stop):
            column = columns[place]
            codes[place] = codes_for(column, step[0], zeros[0], bits)
            errors[place - start] = (column - (codes[place] - zeros[0]) * step[0]) / inverse[place, place]
            rest = inverse[place, place + 1 : stop]
            columns[place + 1 : stop] -= rest[:, None] * errors[place - start]
        columns[stop:] -= inverse[start:stop, stop:].t() @ errors
    # Within a group inputs lie in their own order, as a reader of the groups alone has them.
    group_of = torch.empty_like(order)
    group_of[order] = torch.arange(inputs) // size
    places = group_of.argsort(stable=True)
    by_input = torch.empty_like(codes)
    by_input[order] = codes
    permutation = None if torch.equal(places, torch.arange(inputs)) else places.int()
    return packed(
        by_input[places], torch.cat(steps), torch.cat(zero_points), bits, size, symmetric=symmetric,
        permutation=permutation,
    )  # fmt: skip


def _inverse_factor(moment: torch.Tensor) -> torch.Tensor:
    """U, upper triangular, with U^T U the inverse of the damped `moment`; more damping where it takes that."""
    mean = moment.diagonal().mean()
    damping = DAMPING
    while True:
        damped = moment + torch.eye(len(moment), dtype=moment.dtype) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        if damping >= 1:  # by then every eigenvalue is a mean diagonal: what fails is not finite
            raise ValueError("gptq: the second moment of the inputs is not positive semidefinite, or not finite")
        damping *= 10


def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
    """The layer, one group of linears after another, each on what the ones before it, quantized, give it. The next
    layer sees what comes out of this one quantized. Files of format v1 hold no zero-point of 0, so there is none.
    """
    layers, hidden = layer.in_use()
    weights = dict(layer.weights)
    linears: dict[str, QuantizedWeight] = {}
    for place, group in enumerate(layer.groups):
        moment = collect_inputs(layers, weights, layer.index, hidden, [place])[place].second_moment
        for name in group.names:
            linears[name] = gptq(weights[f"{name}.weight"], moment, bits, group_size, lowest_zero=1)
            weights[f"{name}.weight"] = dequantize(linears[name], torch.float32)
    return QuantizedLayer(linears, carry=forward(layers, weights, layer.index, hidden))


def _format(bits: int, group_size: int) -> GPTQ:
    """Version 1, which every reader of GPTQ has; version 2 is GPTQModel's and newer."""
    return GPTQ(bits=bits, group_size=group_size, desc_act=True, sym=False)


METHOD = Method("gptq", (2, 3, 4, 8), _format, grouped=True, walk="forward", quantize=quantize)
