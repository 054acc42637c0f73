"""logprobs: a token's log-probability and rank, and the most likely tokens with theirs, of each row."""

from typing import Any

import torch

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor
from tkernels.inputs import LAYOUTS, Draws, dtype_of
from tkernels.ops.logits import VALUES, draw_logits
from tkernels.ops.logprobs._definition import reference
from tkernels.ops.logprobs._torch import baseline


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    batch, vocab = int(axes["B"]), int(axes["V"])
    logits = draw_logits(draws, batch, vocab, axes["values"])
    tokens = draws.integers(0, vocab - 1, (batch,)).to(device)
    if device.type != "meta" and batch:
        likely = draws.integers(0, 1, (batch,)).bool().to(device)
        tokens = torch.where(likely, logits.argmax(dim=1), tokens)
    return {
        "logits": draws.laid_out(logits.to(dtype_of(axes["score"])), axes["layout"]),
        "tokens": draws.laid_out(tokens),
        "top": int(axes["top"]),
    }


def bytes_moved(case: Case) -> int:
    logits, top = case.inputs["logits"], int(case.inputs["top"])
    return int(logits.numel() * logits.element_size() + logits.shape[0] * (8 + (top + 1) * (8 + logits.element_size())))


def flops(case: Case) -> int:
    """A difference, its exponential and a sum for each logit, and two comparisons."""
    return 5 * int(case.inputs["logits"].numel())


CONTRACT = Contract(
    name="logprobs",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("B", 0, 2**31 - 1, (0, 1, 2, 3, 5), "rows", batch=True, wide=(4,)),
        Int("V", 1, 2**24, (1, 2, 31, 64, 100, 700), "tokens of the vocabulary", wide=(1000, 4100)),
        Int("top", 0, 2**24, (0, 1, 2, 5, 20, 64), "most likely tokens that are listed", wide=(3, 40)),
        Choice("score", ("float32",), "dtype of the logits", legal=("float32", "float64")),
        Choice("layout", LAYOUTS),
        Choice("values", VALUES),
    ),
    constraints=(Constraint("top <= V"),),
    arguments={
        "logits": Tensor("B V", "score"),
        "tokens": Tensor("B", "int64"),
        "top": Scalar(int, low=0, axis=True),
    },
    outputs={
        "logprobs": Output("B", "score"),
        "ranks": Output("B", "int64"),
        "top_tokens": Output("B top", "int64"),
        "top_logprobs": Output("B top", "score"),
    },
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="last_arriver",
    benchmarks={
        f"B={batch},V={vocab},top={top}": {"B": batch, "V": vocab, "top": top, "score": "float32", "values": "peaked"}
        for batch in (1, 256)
        for vocab in (32000, 151936)  # Llama-2's and Qwen3's
        for top in (0, 20)
    },
    inspected={"alone": {"top": 0}},
    batching=row_batching("logits", "tokens"),
)
