"""Serving a workload in timed rounds: what an arm's engine and a peer have in common."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from experiments.runs.table import spread


@dataclass(frozen=True)
class Served:
    """One round of a workload. `tokens`: each request's output, None where it failed; a request of n completions is n
    requests here. Seconds are the whole round's.

    moments: of each request, when each of its tokens was there, seconds after it came; None where nobody knows.
    late: the requests that came while others ran; where there are some, first_token_s is of them, the rest of the
    others. error: why the first that failed did; None where nobody knows.
    """

    tokens: tuple[tuple[int, ...] | None, ...]
    prompt_tokens: int
    seconds: float
    moments: tuple[tuple[float, ...], ...] | None
    late: frozenset[int] = frozenset()
    error: str | None = None

    @property
    def first_token_s(self) -> list[float]:
        """Seconds to the first token of each request."""
        return [m[0] for i, m in enumerate(self.moments or ()) if m and (not self.late or i in self.late)]

    @property
    def per_token_s(self) -> list[float]:
        """Of each request with several tokens, the mean of the seconds between them."""
        return [
            (m[-1] - m[0]) / (len(m) - 1) for i, m in enumerate(self.moments or ()) if len(m) > 1 and self._early(i)
        ]

    @property
    def gaps_s(self) -> list[float]:
        """The seconds between any two tokens of a request that follow each other."""
        return [b - a for i, m in enumerate(self.moments or ()) if self._early(i) for a, b in itertools.pairwise(m)]

    def _early(self, request: int) -> bool:
        return request not in self.late

    @property
    def output_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens if tokens is not None)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


class Server(Protocol):
    """Serves the whole workload once per call."""

    def __call__(self) -> Served: ...


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the seconds it took."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def interleaved(servers: Sequence[Server], repeats: int, done: Callable[[], None]) -> list[list[Served] | Exception]:
    """Per server its rounds, or what it raised in one, after which it has no more. One round of each server follows the
    other, so that a machine that slows down slows all.

    A first round of each, which is not counted, warms up whatever is made on first use. Every second time the order is
    reversed: nobody's rounds all follow those of one other server, which leave their own state in caches and allocator.
    """
    rounds: list[list[Served]] = [[] for _ in servers]
    failures: dict[int, Exception] = {}
    for index in range(repeats + 1):
        places = range(len(servers))
        for place in places if index % 2 else reversed(places):
            if place not in failures:
                try:
                    served = servers[place]()
                except Exception as error:  # anyone's engine, and the others go on
                    failures[place] = error
                else:
                    rounds[place] += [served] if index else []
            done()
    return [failures.get(place, mine) for place, mine in enumerate(rounds)]


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
