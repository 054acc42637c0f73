"""Timed rounds of a workload in a task, and what rows and samples say of them."""

import statistics
from collections.abc import Sequence
from itertools import count
from typing import Any

from experiments.runs.table import spread
from experiments.serving.rounds import Served, Server, interleaved
from experiments.stages.context import Context
from experiments.stages.yardstick import Yardstick

_YARDSTICK_SAMPLES = 100  # 10 ms after each round


def time_rounds(context: Context, server: Server) -> tuple[list[Served], float | None]:
    """Has a server serve the experiment's rounds; on a CPU, samples of the yardstick are taken between them.

    Returns:
        The rounds, and the yardstick's median in microseconds; None on a GPU.
    """
    repeats = context.plan.experiment.repeats
    yardstick = Yardstick() if context.plan.device.type == "cpu" else None
    numbers = count(1)

    def end_round() -> None:
        if yardstick is not None:
            for _ in range(_YARDSTICK_SAMPLES):
                yardstick()
        context.say(f"{next(numbers)} of {1 + repeats} rounds")

    (rounds,) = interleaved([server], repeats, end_round)
    return rounds, yardstick.median_us if yardstick is not None else None


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


def count_served(last: Served) -> dict[str, Any]:
    """The columns of an engine's or a peer's row that say what was served, by the last round."""
    return {
        "requests": len(last.tokens),
        "requests_failed": sum(tokens is None for tokens in last.tokens),
        "requests_error": last.error,
        "prompt_tokens": last.prompt_tokens,
        "output_tokens": last.output_tokens,
    }


def summarize_times(rounds: Sequence[Served]) -> dict[str, Any]:
    """The columns of an engine's or a peer's row that say how fast it was served."""
    rates = [served.tokens_per_s for served in rounds]
    return {
        "speed_reason": None,
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_iqr": spread(rates),
        "seconds": [served.seconds for served in rounds],
        "ttft_s": percentiles([wait for served in rounds for wait in served.ttft_s]),
        "tpot_s": percentiles([mean for served in rounds for mean in served.tpot_s]),
        "gap_s": percentiles([gap for served in rounds for gap in served.gap_s]),
    }


def no_times(reason: str) -> dict[str, Any]:
    """The same columns where nothing was timed."""
    names = ("tokens_per_s", "tokens_per_s_iqr", "seconds", "ttft_s", "tpot_s", "gap_s")
    return {**dict.fromkeys(names), "speed_reason": reason}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99: the smallest value that at least that share of all do not exceed; None where there is none."""
    if not values:
        return None
    ordered = sorted(values)
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)}
