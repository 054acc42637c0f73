"""route: which experts compute each token, and how much each of them counts."""

from typing import Any

import torch
from torch.nn import functional as F

from tkernels.batching import row_batching
from tkernels.contract import Axes, Case, Choice, Constraint, Contract, Int, Output, Scalar, Tensor, Value, dtype_axis
from tkernels.inputs import LAYOUTS, Draws, dtype_of

VALUES = ("ordinary", "distinct", "ties", "equal", "steep", "barred", "faulty", "huge", "tiny")


def reference(
    logits: torch.Tensor,
    top_k: int,
    *,
    normalize: bool = False,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts by its router's logits, and says what their outputs are multiplied by.

    The choice is defined on the logits, not on probabilities that round: the largest first, and of equal ones (zeros of
    either sign are equal) the expert with the lower index. So it is exact. A row with a NaN gets experts 0 to top_k - 1
    and weights of NaN. Infinite logits rank as such, and their weights are what the formula gives.

    Args:
        logits: [T, E], any float dtype, free row stride.
        top_k: K, how many experts a token gets; at most E.
        normalize: Divides the weights of each token by their sum. Of a softmax that is the softmax of the chosen logits
            alone (as gpt-oss has it), and is computed so.
        sigmoid: Weights are sigmoid(logit), each for itself, in place of the softmax over all E logits.
        bias: [E] float32, added to the logits for the choice alone (DeepSeek-V3's correction of loads). The sum is
            rounded to float32, of float64 logits to float64.
        scale: What the weights are multiplied by last.

    Returns:
        experts [T, K] int32, distinct in each row, the first choice first.
        weights [T, K] float32, computed in it (float64 of float64).

    Source: the top-k gate of Shazeer et al., 2017.
    """
    wide, at_fault, experts = _choose(logits, top_k, bias)
    chosen = wide.gather(1, experts)  # [T, K]
    if sigmoid:
        weights = F.logsigmoid(chosen).softmax(1) if normalize else chosen.sigmoid()
    else:
        weights = chosen.softmax(1) if normalize else wide.softmax(1).gather(1, experts)
    return experts.int(), torch.where(at_fault, torch.nan, weights) * scale


def _choose(
    logits: torch.Tensor, top_k: int, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the logits [T, E] as they are computed with, whether a row [T, 1] has a NaN, its experts [T, K] int64)."""
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    ranked = wide if bias is None else wide + bias
    at_fault = ranked.isnan().any(1, keepdim=True)
    order = torch.where(at_fault, 0.0, ranked).sort(dim=1, descending=True, stable=True).indices
    return wide, at_fault, order[:, :top_k]


def baseline(
    logits: torch.Tensor,
    top_k: int,
    *,
    normalize: bool = False,
    sigmoid: bool = False,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    wide, at_fault, experts = _choose(logits, top_k, bias)
    chosen = wide.gather(1, experts)
    if sigmoid:
        # Of a number below 0 as exp(x) / (1 + exp(x)), less the largest's exponent: a sum of sigmoids can be 0.
        origin = chosen.amax(1, keepdim=True).clamp(max=0) if normalize else 0.0
        weights = (chosen.clamp(max=0) - origin).exp() * chosen.abs().sigmoid()
        if normalize:
            weights = weights / weights.sum(1, keepdim=True)
    else:
        weights = (chosen if normalize else wide).softmax(1)
        weights = weights if normalize else weights.gather(1, experts)
    return experts.int(), torch.where(at_fault, torch.nan, weights) * scale


def make_inputs(axes: Axes, seed: int, device: torch.device) -> dict[str, Any]:
    draws = Draws(seed, device)
    tokens, experts, values = int(axes["T"]), int(axes["E"]), str(axes["values"])
    logits = _draw_logits(draws, tokens, experts, values).to(dtype_of(axes["activation"]))
    bias = None
    if axes["bias"]:
        # Its sums with all logits are float32 numbers: there are no ties in one precision that are none in another.
        bias = draws.grid_normal((experts,), torch.float32)
        bias = draws.laid_out(bias.round() if values in ("ties", "equal") else bias)
    return {
        "logits": draws.laid_out(logits, axes["layout"]),
        "top_k": int(axes["K"]),
        "normalize": bool(axes["normalize"]),
        "sigmoid": bool(axes["sigmoid"]),
        "bias": bias,
        "scale": (1.0, 2.5)[seed % 2],
    }


def _draw_logits(draws: Draws, tokens: int, experts: int, values: str) -> torch.Tensor:
    """[T, E] float32, or what a meta device has of it."""
    shape, kind = (tokens, experts), values if values in ("huge", "tiny") else "ordinary"
    logits = draws.grid_normal(shape, torch.float32, kind)
    if draws.device.type == "meta" or not tokens:
        return logits
    if values == "distinct":  # 512 of them are bfloat16 numbers
        order = torch.stack([draws.permutation(experts) for _ in range(tokens)])
        logits = ((order - experts // 2) * 2.0**-5).float().to(draws.device)
    elif values == "ties":  # of zeros with either sign, among others
        logits = (logits * 2).clamp(-3, 3).round()
    elif values == "equal":
        logits = logits[:, :1].expand(shape).contiguous()
    elif values == "steep":  # distances of all sizes, to those where weights vanish
        logits = logits * 2.0 ** draws.integers(-8, 5, (tokens, 1)).to(draws.device)
    elif values == "barred":  # one expert in three is, and one at least is not
        barred = draws.integers(0, 2, shape) == 0
        barred[torch.arange(tokens), draws.integers(0, experts - 1, (tokens,))] = False
        logits = logits.masked_fill(barred.to(draws.device), -torch.inf)
    elif values == "faulty":  # one row in two has a NaN
        faults = draws.integers(0, 2 * experts - 1, (tokens, 1)) == torch.arange(experts)
        logits = logits.masked_fill(faults.to(draws.device), torch.nan)
    return logits


def bytes_moved(case: Case) -> int:
    logits, bias = case.inputs["logits"], case.inputs["bias"]
    read = logits.numel() * logits.element_size() + (0 if bias is None else bias.nbytes)
    return int(read + 8 * logits.shape[0] * case.inputs["top_k"])


def flops(case: Case) -> int:
    """For each logit a difference, its exponential and a sum, and as many comparisons as there are choices."""
    return int(case.inputs["logits"].numel() * (3 + case.inputs["top_k"]))


def _benchmark(tokens: int, top_k: int, experts: int) -> dict[str, Value]:
    point: dict[str, Value] = {"T": tokens, "K": top_k, "E": experts, "activation": "bfloat16", "values": "ordinary"}
    return point | {"normalize": True, "sigmoid": False, "bias": False, "layout": "contiguous"}


CONTRACT = Contract(
    name="route",
    reference=reference,
    baseline=baseline,
    axes=(
        Int("T", 0, 2**31 - 1, (0, 1, 2, 3, 9), "tokens", batch=True, wide=(70,)),
        Int("E", 1, 2**12, (4, 5, 8, 1, 33, 130), "experts", wide=(200, 512)),
        Int("K", 1, 64, (1, 2, 4, 8), "experts of a token", wide=(8, 16)),
        dtype_axis("activation"),
        Choice("normalize", (False, True), "whether a token's weights sum up to scale"),
        Choice("sigmoid", (False, True), "in place of a softmax"),
        Choice("bias", (False, True), "whether the choice has one"),
        Choice("layout", LAYOUTS, "of the logits"),
        Choice("values", VALUES),
    ),
    constraints=(Constraint("K <= E"),),
    arguments={
        "logits": Tensor("T E", "activation"),
        "top_k": Scalar(int, axis="K", low=1),
        "normalize": Scalar(bool, axis=True),
        "sigmoid": Scalar(bool, axis=True),
        "bias": Tensor("E", "float32", optional=True),
        "scale": Scalar(float),
    },
    outputs={"experts": Output("T K", "int32"), "weights": Output("T K", "float32")},
    make_inputs=make_inputs,
    bytes_moved=bytes_moved,
    flops=flops,
    default="rows_per_program",
    benchmarks={  # Mixtral's, gpt-oss-20b's and Qwen3-30B-A3B's
        f"T={tokens},K={top_k},E={experts}": _benchmark(tokens, top_k, experts)
        for tokens in (1, 8, 64, 256, 4096, 32768)
        for top_k, experts in ((2, 8), (4, 32), (8, 128))
    },
    inspected={
        "softmax": {"normalize": False},
        "biased": {"normalize": True, "sigmoid": True, "bias": True, "activation": "float32"},
    },
    batching=row_batching("logits"),
)
