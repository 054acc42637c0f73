"""Every arm's tokens and log-probabilities beside the first arm's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.runs.rows import Row
from experiments.stages.served_figures import equal_requests


@dataclass(frozen=True)
class Completion:
    """A completion's tokens, and for each place the log-probabilities that were reported, by token."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


@dataclass(frozen=True)
class Answer:
    """What an arm said to a workload: every completion of every request, None where the request failed. prompts: their
    token ids; answers to others do not compare.
    """

    arm: Mapping[str, str]
    settings: Mapping[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[Completion | None, ...]

    @property
    def tokens(self) -> list[tuple[int, ...] | None]:
        return [None if one is None else one.tokens for one in self.completions]

    @staticmethod
    def of(arm: Mapping[str, str], settings: Mapping[str, Any], samples: Mapping[str, Any]) -> "Answer":
        """From what an engine's task kept."""
        completions = [
            None if request["error"] is not None else Completion(tuple(one["tokens"]), _by_token(one["logprobs"]))
            for request in samples["requests"]
            for one in request["completions"]
        ]
        prompts = tuple(tuple(request["prompt"]) for request in samples["requests"])
        return Answer(arm, settings, prompts, tuple(completions))


def _by_token(places: Sequence[Sequence[tuple[int, float]]]) -> tuple[Mapping[int, float], ...]:
    return tuple({token: float(logprob) for token, logprob in place} for place in places)


def compare(first: Answer, other: Answer, common: Mapping[str, Any]) -> Row:
    """The row of `other` beside `first`; `common`: the fields that it shares with every row."""
    drift = 0.0
    divergence: dict[str, float | int | None] | None = None
    for index, (a, b) in enumerate(zip(first.completions, other.completions, strict=True)):
        if a is None or b is None:
            continue
        place = first_difference(a.tokens, b.tokens)
        found = _drift(a, b, place)
        drift = found if math.isnan(found) else max(drift, found)  # max() keeps a NaN that is first, and no other
        if divergence is None and place is not None:
            divergence = {"request": index, "place": place, "margin": _margin(a, b, place)}
    served = sum(a is not None and b is not None for a, b in zip(first.tokens, other.tokens, strict=True))
    equal = equal_requests(first.tokens, other.tokens)
    finite = math.isfinite(drift)
    return Row(
        stage="parity",
        **common,
        arm=dict(other.arm),
        settings=dict(other.settings),
        status="ok" if finite else "wrong",
        reason=None if finite else "a log-probability is not finite",
        first_arm=dict(first.arm),
        tokens_equal=equal == served,
        requests_equal=equal,
        requests=served,
        first_divergence=divergence,
        logprob_drift=drift,
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two outputs differ, one being longer included; None where they are equal."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _drift(a: Completion, b: Completion, end: int | None) -> float:
    """The largest difference of a log-probability that both report, while their contexts are the same."""
    last = len(a.logprobs) if end is None else end + 1
    largest = 0.0
    for mine, theirs in zip(a.logprobs[:last], b.logprobs[:last], strict=False):
        for token in mine.keys() & theirs.keys():
            difference = abs(mine[token] - theirs[token])
            # max() would drop a NaN
            largest = difference if math.isnan(difference) or difference > largest else largest
            if math.isnan(largest):
                return largest
    return largest


def _margin(a: Completion, b: Completion, place: int) -> float | None:
    """How much more likely the first arm found its own token than the other's, in nats."""
    if place >= min(len(a.tokens), len(b.tokens)):
        return None
    mine, theirs = a.tokens[place], b.tokens[place]
    reported = a.logprobs[place]
    return reported[mine] - reported[theirs] if theirs in reported else None
