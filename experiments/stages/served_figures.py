"""What rows and samples say of a workload's timed rounds."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.runs.table import spread
from experiments.serving.rounds import Served


def raw_rounds(rounds: Sequence[Served]) -> list[dict[str, Any]]:
    """Each round's seconds, and of each request, when its tokens were there, seconds after it came; null where nobody
    knows. Rounded to the 100 nanoseconds that a clock tells.
    """
    return [
        {
            "seconds": served.seconds,
            "moments": None if served.moments is None else [[round(at, 7) for at in m] for m in served.moments],
        }
        for served in rounds
    ]


def figures(rounds: Sequence[Served], not_timed: str | None = None) -> dict[str, Any]:
    """The fields that an engine row and a peer row share. `not_timed`: why there is no speed, or None."""
    last = rounds[-1]
    result: dict[str, Any] = {
        "requests": len(last.tokens),
        "requests_failed": sum(tokens is None for tokens in last.tokens),
        "requests_error": last.error,
        "prompt_tokens": last.prompt_tokens,
        "output_tokens": last.output_tokens,
        "speed_reason": not_timed,
    }
    if not_timed is not None:
        return {**result, **dict.fromkeys(_TIMES)}
    rates = [served.tokens_per_s for served in rounds]
    return {
        **result,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_iqr": spread(rates),
        "seconds": [served.seconds for served in rounds],
        "ttft_s": percentiles([wait for served in rounds for wait in served.first_token_s]),
        "tpot_s": percentiles([mean for served in rounds for mean in served.per_token_s]),
        "gap_s": percentiles([gap for served in rounds for gap in served.gaps_s]),
    }


_TIMES = ("tokens_per_s", "tokens_per_s_iqr", "seconds", "ttft_s", "tpot_s", "gap_s")


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99: the smallest value that at least that share of all do not exceed; None where there is none."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)}


def equal_requests(one: Sequence[tuple[int, ...] | None], other: Sequence[tuple[int, ...] | None]) -> int:
    """How many requests have the same tokens in both; a request that failed in either does not count."""
    return sum(a is not None and a == b for a, b in zip(one, other, strict=True))
