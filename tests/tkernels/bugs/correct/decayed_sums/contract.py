"""decayed_sums: the recurrence of a gated linear attention with one state a channel, over packed sequences."""

from itertools import pairwise

import torch

from tkernels.contract import Choice, Contract, Int, Output, Tensor
from tkernels.inputs import LAYOUTS, Draws, dtype_of


def reference(x, gates, cu_seqlens, state):
    """h[t] = exp(gates[t]) * h[t - 1] + x[t], from state[b] at each sequence's first token.

    Args:
        x: [T, C], a float dtype of 16 bits, free row stride.
        gates: [T, C], as x, at most 0: the logarithm of what is kept of the state.
        cu_seqlens: [B+1] int32, where each sequence begins, from 0 to T. A sequence may have no tokens.
        state: [B, C], as x: what each sequence begins with. Written: what it ends with.

    Returns:
        h [T, C], as x.
    """
    out = torch.empty_like(x)
    starts = cu_seqlens.tolist()
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        kept = state[sequence]
        for token in range(begin, end):
            kept = gates[token].exp() * kept + x[token]
            out[token] = kept
        state[sequence] = kept
    return out


def baseline(x, gates, cu_seqlens, state):
    wide = state.float()
    out = reference(x.float(), gates.float(), cu_seqlens, wide)
    state.copy_(wide)
    return out.to(x.dtype)


def make_inputs(axes, seed, device):
    draws = Draws(seed, device)
    tokens, channels, sequences = int(axes["T"]), int(axes["C"]), int(axes["B"])
    dtype = dtype_of(axes["io"])
    x = draws.normal((tokens, channels), dtype)
    depth = {"shallow": 0.1, "deep": 10.0}[str(axes["gate"])]
    gates = -(draws.normal((tokens, channels), torch.float32).abs() * depth).to(dtype)
    inner, _ = draws.integers(0, tokens, (sequences - 1,)).sort()
    starts = torch.cat((torch.zeros(1), inner, torch.full((1,), tokens))).int()
    state = draws.normal((sequences, channels), dtype)
    layout = axes["layout"]
    return {
        "x": draws.laid_out(x, layout),
        "gates": draws.laid_out(gates, layout),
        "cu_seqlens": draws.laid_out(starts),
        "state": draws.laid_out(state),
    }


CONTRACT = Contract(
    name="decayed_sums",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 1, 2**31 - 1, (1, 15, 16, 40, 70), "tokens", wide=(300,)),
        Int("C", 1, 65536, (1, 16, 31, 64), "channels", wide=(100,)),
        Int("B", 1, 2**31 - 1, (1, 2, 3), "sequences"),
        Choice("io", ("float16", "bfloat16"), "of all tensors", legal=("float16", "bfloat16", "float64")),
        Choice("gate", ("shallow", "deep"), "how much of the state a token lets go"),
        Choice("layout", LAYOUTS, "of x and gates"),
    ),
    arguments={
        "x": Tensor("T C", "io"),
        "gates": Tensor("T C", "io"),
        "cu_seqlens": Tensor("B+1", "int32"),
        "state": Tensor("B C", "io"),
    },
    outputs={"out": Output("T C", "io")},
    writes=("state",),
    make_inputs=make_inputs,
    bytes_moved=lambda case: 3 * case.inputs["x"].numel() * case.inputs["x"].element_size(),
    flops=lambda case: 3 * case.inputs["x"].numel(),
    default="torch",
)
