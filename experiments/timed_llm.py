"""Serving a workload with the moment of every token on record: an LLM whose requests may come late, or in batches."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from experiments.schema import Batching
from experiments.workloads import Request
from tsched import LLM, SamplingParams
from tsched.engine import Request as EngineRequest
from tsched.outputs import RequestOutput
from tsched.scheduler import RefusedError
from tsched.served_model import Prepared


@dataclass(frozen=True)
class Timeline:
    """How a workload was served. `moments`: of each request, when the host had each of its tokens, in seconds since the
    request came; empty where it failed. `peak_running`: the most sequences in one step. `seconds`: the whole.
    """

    outputs: tuple[RequestOutput, ...]
    moments: tuple[tuple[float, ...], ...]
    peak_running: int
    seconds: float


@dataclass(eq=False)
class _Watched:
    """A request's way: prepared, in the engine (`begun`) with `length` tokens known, over. moments: on perf_counter's
    clock.
    """

    prepared: Prepared
    after: int
    begun: list[EngineRequest] = field(default_factory=list)
    length: int = 0
    refused: RequestOutput | None = None
    moments: list[float] = field(default_factory=list)


class TimedLLM(LLM):
    """An LLM that serves workloads."""

    def serve(
        self,
        requests: Sequence[Request],
        *,
        batching: Batching = "continuous",
        salt: str = "",
        adapt: Callable[[SamplingParams], SamplingParams] = lambda params: params,
    ) -> Timeline:
        """Serve `requests` to their ends, `adapt` applied to their parameters.

        batching: "static" hands the engine as many requests as it has rows, and the next ones when the last of them has
        ended. All requests that are not late come at the start, also those that wait for their batch.
        salt: prefixes are shared among the requests of one salt only.
        """
        start = time.perf_counter()
        watched = [
            _Watched(self._prepare(next(self._request_ids), r.prompt, adapt(r.params), start, cache_salt=salt), r.after)
            for r in requests
        ]
        num_rows = self._engine.scheduler.table.num_rows
        batch_size = num_rows if batching == "static" else len(watched)
        early = [one for one in watched if one.after == 0]
        batches = deque(early[i : i + batch_size] for i in range(0, len(early), batch_size))
        late = deque(sorted((one for one in watched if one.after), key=lambda one: one.after))
        running: list[_Watched] = []
        peak_running = early_tokens = 0
        try:
            while batches or late or self._engine.has_unfinished:
                if batches and not self._engine.has_unfinished:
                    running = self._begin(batches.popleft(), start)
                while late and (early_tokens >= late[0].after * len(early) or not self._engine.has_unfinished):
                    running += self._begin([late.popleft()], time.perf_counter())
                if not self._engine.has_unfinished:  # the door refused them all
                    continue
                num_finished = len(self._engine.step())
                peak_running = max(peak_running, self._engine.scheduler.num_running + num_finished)
                early_tokens += self._note_tokens(running, time.perf_counter())
        except BaseException:
            for one in watched:
                for request in one.begun:
                    self._engine.abort(request.sequence.id)
            raise
        seconds = time.perf_counter() - start
        outputs = tuple(one.refused or self._output(one.prepared, one.begun) for one in watched)
        moments = tuple(self._since_arrival(one) for one in watched)
        return Timeline(outputs, moments, peak_running, seconds)

    def _begin(self, batch: Sequence[_Watched], arrival: float) -> list[_Watched]:
        """Queue `batch`, which came at `arrival`; returns those that were not refused."""
        for one in batch:
            try:
                one.begun = self._start(one.prepared)
                one.length = len(one.prepared.token_ids)
            except RefusedError as error:
                one.refused = self._refused(one.prepared, str(error), time.perf_counter())
            for request in one.begun:
                request.arrival_time = arrival
        return [one for one in batch if one.refused is None]

    def _note_tokens(self, running: list[_Watched], now: float) -> int:
        """Give each new token of `running` its moment, and take out those that are over; returns how many tokens the
        requests got that were there from the start.
        """
        known = self._engine.scheduler.table.known.tolist()
        num_early, some_ended = 0, False
        for one in running:  # inside what is timed: no more work than it needs
            sequence = one.begun[0].sequence
            row = sequence.row
            if row < 0:  # it waits, or has ended
                length = sequence.tokens.size
                some_ended = some_ended or sequence.finish_reason is not None
            else:
                length = known[row]
            if length > one.length:
                one.moments.append(now)  # a step gives a sequence one token
                one.length = length
                num_early += one.after == 0
        if some_ended:
            running[:] = [one for one in running if one.begun[0].sequence.finish_reason is None]
        return num_early

    def _since_arrival(self, one: _Watched) -> tuple[float, ...]:
        if one.refused is not None or one.begun[0].error is not None:
            return ()
        return tuple(moment - one.begun[0].arrival_time for moment in one.moments)
