"""How well the model ranks variants: beside the times that a GPU report measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from experiments.runs.rows import Row


@dataclass(frozen=True)
class Agreement:
    """At one point of an op.

    tau: Kendall's rank correlation of modelled and measured times, tau-b; None of fewer than two variants, or where all
        of one kind are equal. regret: the measured time of the variant that the model finds fastest over the fastest
        measured, less 1. variants: how many have both times.
    """

    op: str
    point: str
    variants: int
    tau: float | None
    regret: float | None
    chosen: str = ""
    best: str = ""


def agreements(rows: Sequence[Row], predicted: Mapping[tuple[str, str, str], float]) -> list[Agreement]:
    """Of every point that was measured with a time, in order.

    Args:
        rows: Of a report.
        predicted: (op, variant, point) -> modelled microseconds.
    """
    measured: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row.stage == "kernels" and row.median_us is not None:
            measured.setdefault((str(row.op), str(row.point)), {})[str(row.variant)] = row.median_us
    return [_agreement(op, point, times, predicted) for (op, point), times in measured.items()]


def _agreement(
    op: str, point: str, times: Mapping[str, float], predicted: Mapping[tuple[str, str, str], float]
) -> Agreement:
    both = [variant for variant in times if (op, variant, point) in predicted]
    if not both:
        return Agreement(op, point, 0, None, None)
    modelled = {variant: predicted[op, variant, point] for variant in both}
    chosen, best = min(both, key=lambda one: modelled[one]), min(both, key=lambda one: times[one])
    tau = kendall_tau([modelled[one] for one in both], [times[one] for one in both])
    return Agreement(op, point, len(both), tau, times[chosen] / times[best] - 1, chosen, best)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b (Kendall, 1945): 1 where both are in the same order, -1 in the opposite one, ties left out.

    None where either has no two values that differ.
    """
    pairs = list(combinations(range(len(first)), 2))
    signs = [(_sign(first[i] - first[j]), _sign(second[i] - second[j])) for i, j in pairs]
    ordered = math.sqrt(sum(one != 0 for one, _ in signs)) * math.sqrt(sum(other != 0 for _, other in signs))
    return sum(one * other for one, other in signs) / ordered if ordered else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def mean_regret(found: Sequence[Agreement]) -> float | None:
    """The geometric mean over points of 1 + regret, less 1; None where nothing was measured."""
    regrets = [one.regret for one in found if one.regret is not None]
    return math.exp(sum(math.log1p(regret) for regret in regrets) / len(regrets)) - 1 if regrets else None
