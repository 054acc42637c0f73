"""Serving a workload in timed rounds: what an arm's engine and a peer have in common."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
