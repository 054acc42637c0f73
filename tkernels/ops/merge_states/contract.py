"""merge_states: two partial attentions over disjoint keys become the attention over all of them."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Contract, Int, Output, Tensor, dtype_axis
from tkernels.inputs import KINDS, Draws, dtype_of, poison
from tkernels.ops.paged_cache import drawn_sinks

EMPTY = float("-inf")


def reference(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each part weighs as much as the sum of its exponentiated logits, so as exp(lse).

    Args:
        out_a: [T, Hq, Dv], any float dtype, free token and head strides: attention over the first keys.
        lse_a: [T, Hq] float32, free token stride: the log-sum-exp (natural) of their logits. -inf is a part without
            keys, whose out_a is not read.
        out_b, lse_b: The same over the other keys.
        sinks: [Hq] float32, natural: one more logit for each query head, in neither part's log-sum-exp, which has a
            weight but no value. -inf is none. Of +inf or NaN, which no kernel checks, the head's results are undefined.

    Returns:
        out [T, Hq, Dv], as out_a; zeros where both parts are empty.
        lse [T, Hq] float32 (float64 of float64), that of a sink included; -inf where both parts are empty without one.

    Source: online softmax (Milakov and Gimelshein, 2018); as an operation on attention states, FlashInfer's cascade
    inference (Ye et al., 2024).
    """
    rows = [lse_a, lse_b, *([] if sinks is None else [sinks.expand_as(lse_a)])]
    lses = torch.stack(rows)  # [2, T, Hq], or 3
    weights = lses.softmax(0).where(lses > EMPTY, 0.0)[:2].unsqueeze(-1)
    outs = torch.stack([out_a, out_b]).where(weights > 0, 0.0)  # [2, T, Hq, Dv]
    return (weights * outs).sum(0).to(out_a.dtype), lses.logsumexp(0)


def baseline(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.maximum(lse_a, lse_b)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    origin = top.masked_fill(top == EMPTY, 0.0)
    weight_a, weight_b = (lse_a - origin).exp_(), (lse_b - origin).exp_()
    total = weight_a + weight_b
    if sinks is not None:
        total += (sinks - origin).exp_()
    share = 1 / total.clamp_min(1.0)  # the larger weight is 1; of two empty parts: zeros, and not 0 / 0
    a = out_a.masked_fill((weight_a == 0).unsqueeze(-1), 0.0) * (weight_a * share).unsqueeze(-1)
    b = out_b.masked_fill((weight_b == 0).unsqueeze(-1), 0.0) * (weight_b * share).unsqueeze(-1)
    return a.add_(b).to(out_a.dtype), total.log_().add_(top)


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    shape, dtype = (int(axes["T"]), int(axes["Hq"]), int(axes["Dv"])), dtype_of(axes["activation"])
    # At least 1: around 0 a log-sum-exp can cancel to far less than its terms.
    level = draws.normal(shape[:2], torch.float32).abs() + (60.0 if axes["states"] == "high" else 1.0)
    lses = [level, level + draws.normal(shape[:2], torch.float32).abs()]
    if axes["states"] == "one_sided":  # the smaller weight is less than an fp32 sum can hold, or nothing at all
        lses[0] = lses[1] - torch.tensor([12.0, 30.0, 200.0])[draws.integers(0, 2, shape[:2])].to(device)
    lses = [lses[int(first)] for first in draws.permutation(2)]
    inputs: dict[str, Any] = {}
    for name, lse in zip("ab", lses, strict=True):
        out = draws.normal(shape, dtype, axes["values"])
        if axes["states"] == "empty":
            empty = draws.integers(0, 1, shape[:2]).bool().to(device)
            lse, out = lse.masked_fill(empty, EMPTY), out.masked_fill(empty.unsqueeze(-1), poison(dtype))
        inputs[f"out_{name}"] = draws.laid_out(out, axes["layout"])
        inputs[f"lse_{name}"] = draws.laid_out(lse, "contiguous" if axes["layout"] == "contiguous" else "padded")
    sinks = None
    if axes["sinks"]:
        sinks = drawn_sinks(draws, shape[1]) + (60.0 if axes["states"] == "high" else 0.0)
    return {**inputs, "sinks": sinks}


def bytes_moved(case: Case) -> int:
    out, lses = case.inputs["out_a"], [case.inputs["lse_a"], case.inputs["lse_b"]]
    read = sum(int((lse > EMPTY).sum()) for lse in lses) * out.shape[2]
    sinks = 0 if case.inputs["sinks"] is None else case.inputs["sinks"].nbytes
    return int((read + out.numel()) * out.element_size() + 3 * 4 * lses[0].numel() + sinks)


def flops(case: Case) -> int:
    return 3 * int(case.inputs["out_a"].numel())  # two products and a sum for each output


CONTRACT = Contract(
    name="merge_states",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3), "tokens", batch=True, wide=(20,)),
        Int("Hq", 1, 65535, (1, 3, 5, 8), "query heads", wide=(32,)),
        Int("Dv", 1, 1024, (1, 16, 31, 80, 256, 128), "head size of values"),
        dtype_axis("activation"),
        Choice("layout", ("contiguous", "padded", "head_major")),
        Choice("sinks", (False, True), "each query head has a logit more, without a key"),
        Choice("states", ("ordinary", "high", "one_sided", "empty"), "how the two log-sum-exps compare"),
        Choice("values", KINDS),
    ),
    arguments={
        "out_a": Tensor("T Hq Dv", "activation"),
        "lse_a": Tensor("T Hq", "float32"),
        "out_b": Tensor("T Hq Dv", "activation"),
        "lse_b": Tensor("T Hq", "float32"),
        "sinks": Tensor("Hq", "float32", optional=True),
    },
    outputs={"out": Output("T Hq Dv", "activation"), "lse": Output("T Hq", "float32")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="head_tile",
    benchmarks={
        f"T={tokens},Hq=32,Dv=128": {
            "T": tokens,
            "Hq": 32,
            "Dv": 128,
            "activation": "bfloat16",
            "layout": "contiguous",
            "states": "ordinary",
            "values": "ordinary",
        }
        for tokens in (1, 64, 4096)
    },
    inspected={"sinks": {"sinks": True}},
    batching=row_batching("out_a", "lse_a", "out_b", "lse_b"),
)
