"""The deltas of one request that a worker serves, for its one consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tsched.serving.engine_client import Delta, count_numbers
from tsched.serving.link import join_deltas


class WorkerStream:
    """The deltas of a request that a worker serves.

    Args:
        abort: Ends the request, unless it has finished.

    Attributes:
        may_start_over: As of DeltaStream.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.may_start_over = False
        self._abort = abort
        self._news: Delta | None = None  # that nobody has taken yet
        self._error: Exception | None = None
        self._is_over = False
        self._changed = asyncio.Event()

    def __aiter__(self) -> WorkerStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        try:
            await self._changed.wait()
        except asyncio.CancelledError:
            self._abort()
            raise
        news, self._news = self._news, None
        if news is None:
            self._is_over = True
            assert self._error is not None, "something has changed"
            raise self._error
        self._is_over = news.is_last
        if self._error is None:
            self._changed.clear()
        return news

    @property
    def num_unread(self) -> int:
        samples = () if self._news is None else self._news.samples
        return sum(
            count_numbers(one.token_ids, one.logprobs and [place.logprobs for place in one.logprobs]) for one in samples
        )

    async def aclose(self) -> None:
        """Aborts the request, unless it has finished, and ends the iteration."""
        self._abort()
        self._is_over = True

    def put(self, delta: Delta) -> None:
        """Gives the consumer a delta, together with what it has not taken yet."""
        self._news = delta if self._news is None or delta.starts_over else join_deltas(self._news, delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """Ends the iteration with an error, once the consumer has taken what came before."""
        self._error = error
        self._changed.set()
