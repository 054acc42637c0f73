"""Every arm's tokens and log-probabilities beside the first arm's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Completion:
    """A completion's tokens, and for each place the log-probabilities that were reported, by token."""

    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]]


Answer = Sequence[Completion | None]
"""What an arm said to a workload: every completion of every request, None where the request failed."""


def read_answer(samples: Mapping[str, Any]) -> Answer:
    """From what an engine's task kept."""
    return [
        None if request["error"] is not None else Completion(one["tokens"], [dict(place) for place in one["logprobs"]])
        for request in samples["requests"]
        for one in request["completions"]
    ]


def compare_answers(first: Answer, other: Answer) -> dict[str, Any]:
    """The columns of a parity row that say how `other` differs from `first`."""
    both = [
        (index, a, b, first_difference(a.tokens, b.tokens))
        for index, (a, b) in enumerate(zip(first, other, strict=True))
        if a is not None and b is not None
    ]
    # numpy's maximum is a NaN where one is, as Python's is not.
    drift = float(np.max([_drift(a, b, place) for _, a, b, place in both], initial=0.0))
    divergences = [
        {"request": index, "place": place, "margin": _margin(a, b, place)}
        for index, a, b, place in both
        if place is not None
    ]
    is_finite = math.isfinite(drift)
    return {
        "status": "ok" if is_finite else "wrong",
        "reason": None if is_finite else "a log-probability is not finite",
        "tokens_equal": not divergences,
        "requests_equal": len(both) - len(divergences),
        "requests": len(both),
        "first_divergence": next(iter(divergences), None),
        "logprob_drift": drift,
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two outputs differ, one being longer included; None where they are equal."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _drift(a: Completion, b: Completion, end: int | None) -> float:
    """The largest difference of a log-probability that both report, while their contexts are the same."""
    last = len(a.logprobs) if end is None else end + 1
    differences = [
        mine[token] - theirs[token]
        for mine, theirs in zip(a.logprobs[:last], b.logprobs[:last], strict=False)
        for token in mine.keys() & theirs.keys()
    ]
    return float(np.max(np.abs(differences), initial=0.0))


def _margin(a: Completion, b: Completion, place: int) -> float | None:
    """How much more likely the first arm found its own token than the other's, in nats."""
    if place >= min(len(a.tokens), len(b.tokens)):
        return None
    mine, theirs = a.tokens[place], b.tokens[place]
    reported = a.logprobs[place]
    return reported[mine] - reported[theirs] if theirs in reported else None
