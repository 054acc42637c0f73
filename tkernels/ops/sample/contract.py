"""sample: one token of each row, by temperature, penalties, min-p, top-k and top-p; defined to the bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tkernels.batching import Batching, Inputs, row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor
from tkernels.inputs import LAYOUTS, Draws, dtype_of
from tkernels.ops.logits import VALUES, draw_logits
from tkernels.ops.sample._definition import reference
from tkernels.ops.sample._torch import baseline

ASKS = ("nothing", "one", "all", "edge", "mixed")


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    batch, vocab = int(axes["B"]), int(axes["V"])
    logits = draw_logits(draws, batch, vocab, axes["values"])
    asks = _draw_asks(draws, batch, vocab, str(axes["asks"]))
    inputs: dict[str, Any] = {"logits": draws.laid_out(logits.to(dtype_of(axes["score"])), axes["layout"]), **asks}
    inputs["seeds"] = draws.integers(-(2**63), 2**63 - 2, (batch,))
    inputs["indices"] = draws.integers(0, 2**31 - 1, (batch,)) >> draws.integers(0, 31, (batch,))
    inputs |= {"counts": None, "slots": None, "penalties": None, "inverse_cdf": bool(axes["inverse_cdf"])}
    if axes["counts"]:
        rows = int(axes["R"])
        counts = draws.integers(-6, 5, (rows, vocab)).clamp(min=0).int()
        inputs["counts"] = draws.laid_out(counts.to(device), axes["layout"])
        inputs["slots"] = draws.integers(-1, rows - 1, (batch,))
        steps = draws.integers(-200, 200, (batch, 3)) / 100
        steps[:, 0] = 2.0 ** steps[:, 0]
        inputs["penalties"] = steps.float()
    laid = ("temperature", "top_k", "top_p", "min_p", "seeds", "indices", "slots", "penalties")
    return inputs | {name: draws.laid_out(inputs[name].to(device)) for name in laid if inputs[name] is not None}


def _draw_asks(draws: Draws, batch: int, vocab: int, asks: str) -> dict[str, torch.Tensor]:
    """What each row asks for, on the CPU: nothing but a draw, one filter, all of them, or what is at their edges."""
    temperature = 2.0 ** (draws.integers(-200, 200, (batch,)).double() / 100)
    top_k = 1 + (draws.integers(0, 2**31, (batch,)) % vocab >> draws.integers(0, 8, (batch,)))
    top_p = draws.integers(1, 2**31, (batch,)).double() * 2.0**-31
    min_p = 2.0 ** -(draws.integers(0, 2000, (batch,)).double() / 100)
    wanted = torch.ones((4, batch), dtype=torch.bool)
    if asks == "nothing":
        wanted[1:] = False
    elif asks == "top_p":
        wanted[1:] = torch.tensor([[False], [True], [False]])
    elif asks == "one":
        wanted[1:] = torch.arange(1, 4)[:, None] == draws.integers(1, 3, (batch,))
    elif asks == "mixed":
        wanted = draws.integers(0, 3, (4, batch)) > 0
    elif asks == "edge":
        # One token, all of them, and one too many; the least and the most of what may be asked, and what is next to it.
        ulp = 2.0**-53
        top_k = _pick(draws, batch, 1, vocab, vocab + 1, 2**63 - 1)
        top_p = _pick(draws, batch, 5e-324, 0.5 - ulp, 0.5, 0.5 + 2 * ulp, 1 - ulp)
        min_p = _pick(draws, batch, 0.0, 5e-324, 1 - ulp, 1.0)
        temperature = _pick(draws, batch, 2.0**-760, 2.0**-40, 1.0, 2.0**40, 1.7e308)
        wanted[1:] = draws.integers(0, 1, (3, batch)) > 0
    return {
        "temperature": torch.where(wanted[0], temperature, 0.0),
        "top_k": torch.where(wanted[1], top_k, 0),
        "top_p": torch.where(wanted[2], top_p.double(), 1.0),
        "min_p": torch.where(wanted[3], min_p, 0.0),
    }


def _pick(draws: Draws, batch: int, *values: float) -> torch.Tensor:
    """[B] of the values: int64, or float64."""
    dtype = torch.int64 if isinstance(values[0], int) else torch.float64
    return torch.tensor(values, dtype=dtype)[draws.integers(0, len(values) - 1, (batch,))]


def bytes_moved(case: Case) -> int:
    logits, counts, slots = (case.inputs[name] for name in ("logits", "counts", "slots"))
    read = logits.numel() * logits.element_size() + 7 * 8 * logits.shape[0]
    if counts is not None:
        read += 4 * counts.shape[1] * int(slots[slots >= 0].unique().numel()) + 20 * logits.shape[0]
    return int(read)


def flops(case: Case) -> int:
    """A distance, two polynomials and a word of Philox for each token."""
    return 100 * int(case.inputs["logits"].numel())


_ROWS = ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "indices", "slots", "penalties")
_PENALIZED = ("counts", "slots", "penalties")


def _take(inputs: Inputs, picks: Sequence[int]) -> dict[str, Any]:
    return row_batching(*(name for name in _ROWS if inputs[name] is not None)).take(inputs, picks)


def _part(inputs: Inputs, results: Mapping[str, torch.Tensor], member: int) -> dict[str, torch.Tensor]:
    return {"tokens": results["tokens"][member]}


CONTRACT = Contract(
    name="sample",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("B", 0, 2**31 - 1, (0, 1, 2, 3, 5), "rows", batch=True, wide=(4,)),
        Int("V", 1, 2**24, (1, 2, 31, 64, 100, 700), "tokens of the vocabulary", wide=(1000, 4100)),
        Int("R", 0, 2**31 - 1, (1, 2, 4), "slots of counts", batch=True),
        Choice("score", ("float32",), "dtype of the logits", legal=("float32", "float64")),
        *(Choice(name, (False, True)) for name in _PENALIZED),
        Choice("inverse_cdf", (False, True), "draws by one number a row"),
        Choice("layout", LAYOUTS),
        Choice("values", VALUES),
        Choice("asks", ASKS, "of the rows", legal=(*ASKS, "top_p")),
    ),
    constraints=(Constraint("slots == counts"), Constraint("penalties == counts")),
    arguments={
        "logits": Tensor("B V", "score"),
        "temperature": Tensor("B", "float64"),
        "top_k": Tensor("B", "int64"),
        "top_p": Tensor("B", "float64"),
        "min_p": Tensor("B", "float64"),
        "seeds": Tensor("B", "int64"),
        "indices": Tensor("B", "int64"),
        "counts": Tensor("R V", "int32", optional=True),
        "slots": Tensor("B", "int64", optional=True, indexes="R"),
        "penalties": Tensor("B 3", "float32", optional=True),
        "inverse_cdf": Scalar(bool, axis=True),
    },
    outputs={"tokens": Output("B", "int64", exact=True)},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="candidates",
    benchmarks={
        f"B={batch},V={vocab},{asks}": {"B": batch, "V": vocab, "score": "float32", "values": "peaked", "asks": asks}
        | dict.fromkeys((*_PENALIZED, "inverse_cdf"), False)
        for batch in (1, 256)
        for vocab in (32000, 151936)  # Llama-2's and Qwen3's
        for asks in ("nothing", "all")
    },
    inspected={
        "penalized": dict.fromkeys(_PENALIZED, True),
        "inverse_cdf": {"inverse_cdf": True},
    },
    batching=Batching(count=lambda inputs: int(inputs["logits"].shape[0]), take=_take, part=_part),
)
