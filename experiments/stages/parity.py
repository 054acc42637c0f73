"""Every arm's tokens and log-probabilities beside the first arm's."""

import math
from collections.abc import Sequence

from experiments.rows import ParityRow
from experiments.stages.context import Context
from experiments.stages.engine import Answer
from experiments.stages.serving import equal_requests
from tsched.outputs import CompletionOutput


def run(context: Context, answers: Sequence[Answer]) -> None:
    """Records one row per workload and arm after the first that answered."""
    pairs = []
    for index, answer in enumerate(answers):
        same = [earlier for earlier in answers[:index] if earlier.workload == answer.workload]
        pairs += [(same[0], answer)] if same else []
    with context.step("parity", len(pairs)) as step:
        for first, other in pairs:
            context.folder.record(_compare(context, first, other))
            step.advance("")


def _compare(context: Context, first: Answer, other: Answer) -> ParityRow:
    drift = 0.0
    divergence: dict[str, float | int | None] | None = None
    ours, theirs = _completions(first), _completions(other)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            continue
        place = first_difference(a.token_ids, b.token_ids)
        drift = max(drift, _drift(a, b, place))
        if divergence is None and place is not None:
            divergence = {"request": index, "place": place, "margin": _margin(a, b, place)}
    tokens = [[None if c is None else tuple(c.token_ids) for c in answers] for answers in (ours, theirs)]
    served = sum(a is not None and b is not None for a, b in zip(*tokens, strict=True))
    equal = equal_requests(*tokens)
    finite = math.isfinite(drift)
    return ParityRow(
        **context.common(arm=other.arm, settings=other.settings, workload=other.workload.name),
        status="ok" if finite else "wrong",
        reason=None if finite else "a log-probability is not finite",
        first_arm=first.arm,
        tokens_equal=equal == served,
        requests_equal=equal,
        requests=served,
        first_divergence=divergence,
        logprob_drift=drift,
    )


def _completions(answer: Answer) -> list[CompletionOutput | None]:
    """Every completion of every request; None where the request failed."""
    return [c if output.error is None else None for output in answer.outputs for c in output.outputs]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two outputs differ, one being longer included; None where they are equal."""
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _drift(a: CompletionOutput, b: CompletionOutput, end: int | None) -> float:
    """The largest difference of a log-probability that both report, while their contexts are the same."""
    assert a.logprobs is not None
    assert b.logprobs is not None
    last = len(a.logprobs) if end is None else end + 1
    largest = 0.0
    for mine, theirs in zip(a.logprobs[:last], b.logprobs[:last], strict=False):
        for token in mine.keys() & theirs.keys():
            difference = abs(mine[token].logprob - theirs[token].logprob)
            # max() would drop a NaN
            largest = difference if math.isnan(difference) or difference > largest else largest
            if math.isnan(largest):
                return largest
    return largest


def _margin(a: CompletionOutput, b: CompletionOutput, place: int) -> float | None:
    """How much more likely the first arm found its own token than the other's, in nats."""
    assert a.logprobs is not None
    if place >= min(len(a.token_ids), len(b.token_ids)):
        return None
    mine, theirs = a.token_ids[place], b.token_ids[place]
    reported = a.logprobs[place]
    return reported[mine].logprob - reported[theirs].logprob if theirs in reported else None
