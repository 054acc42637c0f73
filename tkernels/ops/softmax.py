"""What attention's softmax may have beside its scores: a cap that they approach; a sink, which is a logit without a
value.
"""

import math

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)


@triton.jit
def tanh_of(x):
    """fp32 [...] -> the hyperbolic tangent of each, 2 units in the last place off at most.

    tanh.approx, one instruction, is 2**-11 off: 0.02 of a logit that is capped at 50.
    """
    # Near 0, where 1 - 2 e / (1 + e) loses the digits of what is left: x (1 + x^2 P(x^2)) up to 0.625, with P fitted to
    # the least largest relative error, 4e-9.
    square = x * x
    rest = -0.00571701606 * square + 0.0206505591
    rest = rest * square - 0.0537434885
    rest = rest * square + 0.133314912
    rest = rest * square - 0.333332839
    near = x * square * rest + x
    size = tl.abs(x)
    small = tl.exp2(size * -2.8853900817779268)  # exp(-2 size): of sizes past all numbers 0
    far = 1.0 - 2.0 * small / (1.0 + small)
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def beside_sinks(m, total, sinks):
    """What keys keep beside their rows' sinks [ROWS], natural logits that have a weight and no value; -inf is none.

    m, total: The maximum of the keys' logits, in units of log 2, and the sum of their weights; of no keys -inf and 1.

    Returns (what their mean is to be multiplied by, m, total), the latter two with the sinks.
    """
    sinks = sinks * 1.4426950408889634
    top = tl.maximum(m, sinks)
    origin = tl.where(top == float("-inf"), 0.0, top)  # of no key and no sink: weights of 0, and not -inf - -inf
    kept = tl.exp2(m - origin)
    # Spelled out, so that every kernel rounds it alike. The largest weight is 1; of nothing 0 / 1, and not 0 / 0.
    every = tl.maximum(tl.fma(total, kept, tl.exp2(sinks - origin)), 1.0)
    return total * kept / every, top, every


def capped(logits: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """What attention makes of its scores before it masks any: soft_cap * tanh(logits / soft_cap)."""
    return logits if soft_cap is None else (logits / soft_cap).tanh() * soft_cap


def softmax_and_lse(logits: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights [..., H, keys] of masked logits [..., H, keys], some of each finite, and the log-sum-exp [..., H].

    Args:
        sinks: [H], one more logit for each head, of which no weight is returned; None is none.
    """
    if sinks is None:
        return logits.softmax(-1), logits.logsumexp(-1)
    every = torch.cat((logits, sinks.unsqueeze(-1).expand(*logits.shape[:-1], 1)), dim=-1)
    return every.softmax(-1)[..., :-1], every.logsumexp(-1)


def scale_arguments(scale: float, soft_cap: float | None) -> dict[str, float | None]:
    """What products of queries and keys are multiplied by: `scale_log2`, to units of log 2; of logits that are capped,
    `scale_log2` to units of the cap, and their tangents by `cap_log2` to units of log 2.
    """
    if soft_cap is None:
        return {"scale_log2": scale * LOG2_E, "cap_log2": None}
    return {"scale_log2": scale / soft_cap, "cap_log2": soft_cap * LOG2_E}
