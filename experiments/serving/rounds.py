"""Serving a workload in timed rounds: what an arm's engine and a peer have in common."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Served:
    """One round of a workload. `tokens`: each request's output, None where it failed; a request of n completions is n
    requests here. Seconds are the whole round's.

    moments: of each request, when each of its tokens was there, seconds after it came; None where nobody knows.
    late: the requests that came while others ran; where there are some, ttft_s is of them, the rest of the others.
    error: why the first that failed did; None where nobody knows.
    """

    tokens: tuple[tuple[int, ...] | None, ...]
    prompt_tokens: int
    seconds: float
    moments: tuple[tuple[float, ...], ...] | None
    late: frozenset[int] = frozenset()
    error: str | None = None

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token of each request."""
        return [moments[0] for moments in self._moments_of(late=bool(self.late)) if moments]

    @property
    def tpot_s(self) -> list[float]:
        """Of each request with several tokens, the mean of the seconds between them."""
        return [(m[-1] - m[0]) / (len(m) - 1) for m in self._moments_of(late=False) if len(m) > 1]

    @property
    def gap_s(self) -> list[float]:
        """The seconds between any two tokens of a request that follow each other."""
        return [after - before for m in self._moments_of(late=False) for before, after in itertools.pairwise(m)]

    def _moments_of(self, *, late: bool) -> Iterator[tuple[float, ...]]:
        """The moments of the late requests, or of the others."""
        return (moments for index, moments in enumerate(self.moments or ()) if (index in self.late) == late)

    @property
    def output_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens if tokens is not None)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


Server = Callable[[], Served]
"""Serves the whole workload once per call."""


def interleaved(servers: Sequence[Server], repeats: int, done: Callable[[], None]) -> list[list[Served]]:
    """Per server its rounds. One round of each server follows the other, so that a machine that slows down slows all.

    A first round of each, which is not counted, warms up whatever is made on first use. Every second time the order is
    reversed: nobody's rounds all follow those of one other server, which leave their own state in caches and allocator.
    """
    rounds: list[list[Served]] = [[] for _ in servers]
    for index in range(repeats + 1):
        places = range(len(servers))
        for place in places if index % 2 else reversed(places):
            served = servers[place]()
            if index:
                rounds[place].append(served)
            done()
    return rounds
