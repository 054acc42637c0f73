"""Serving a workload with the moment of every token on record: an LLM whose requests may come late, or in batches."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from experiments.schema import Batching
from experiments.serving.requests import Request
from tsched import LLM, SamplingParams
from tsched.execution.engine import Request as EngineRequest
from tsched.requests.errors import RefusedError
from tsched.requests.outputs import RequestOutput
from tsched.requests.prompts import PreparedRequest
from tsched.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Timeline:
    """How a workload was served. `moments`: of each completion, a request's side by side, when the host had each of its
    tokens, in seconds since the request came; empty where the request failed. `peak_running`: the most sequences in one
    step. `seconds`: the whole.
    """

    outputs: tuple[RequestOutput, ...]
    moments: tuple[tuple[float, ...], ...]
    peak_running: int
    seconds: float


@dataclass(eq=False)
class _Watched:
    """A request's way: prepared, in the engine (`begun`, one for each completion), over."""

    prepared: PreparedRequest
    after: int
    begun: list[EngineRequest] = field(default_factory=list)
    lines: list["_Line"] = field(default_factory=list)
    refused: RequestOutput | None = None


@dataclass(eq=False)
class _Line:
    """A completion's way, with `length` tokens known. moments: on perf_counter's clock."""

    sequence: Sequence
    is_early: bool
    length: int
    moments: list[float] = field(default_factory=list)


class TimedLLM(LLM):
    """An LLM that serves workloads."""

    def serve(
        self,
        requests: Items[Request],
        *,
        batching: Batching = "continuous",
        salt: str = "",
        adapt: Callable[[SamplingParams], SamplingParams] = lambda params: params,
    ) -> Timeline:
        """Serve `requests` to their ends, `adapt` applied to their parameters.

        batching: "static" hands the engine as many requests as it has rows, and the next ones when the last of them has
        ended. All requests that are not late come at the start, also those that wait for their batch.
        salt: prefixes are shared among the requests of one salt and tenant only.
        """
        start = time.perf_counter()
        watched = [_Watched(self._prepared(r, adapt(r.params), start, salt), r.after) for r in requests]
        num_rows = self._engine.scheduler.table.num_rows
        batch_size = num_rows if batching == "static" else len(watched)
        early = [one for one in watched if one.after == 0]
        batches = deque(early[i : i + batch_size] for i in range(0, len(early), batch_size))
        late = deque(sorted((one for one in watched if one.after), key=lambda one: one.after))
        num_early = sum(one.prepared.params.n for one in early)
        running: list[_Line] = []
        peak_running = early_tokens = 0
        try:
            while batches or late or self._engine.has_unfinished:
                if batches and not self._engine.has_unfinished:
                    running = self._begin(batches.popleft(), start)
                while late and (early_tokens >= late[0].after * num_early or not self._engine.has_unfinished):
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
        moments = tuple(times for one in watched for times in self._since_arrival(one))
        return Timeline(outputs, moments, peak_running, seconds)

    def _prepared(self, request: Request, params: SamplingParams, arrival: float, salt: str) -> PreparedRequest:
        return self._prepare(
            next(self._request_ids), request.prompt, params, arrival,
            priority=request.priority, cache_salt=f"{salt}, tenant {request.tenant}",
        )  # fmt: skip

    def _begin(self, batch: Items[_Watched], arrival: float) -> list[_Line]:
        """Queue `batch`, which came at `arrival`; returns the completions of those that were not refused."""
        for one in batch:
            try:
                one.begun = self._start(one.prepared)
            except RefusedError as error:
                one.refused = self._refused(one.prepared, str(error), time.perf_counter())
            for request in one.begun:
                request.arrival_time = arrival
                one.lines.append(_Line(request.sequence, one.after == 0, len(one.prepared.token_ids)))
        return [line for one in batch for line in one.lines]

    def _note_tokens(self, running: list[_Line], now: float) -> int:
        """Give each new token of `running` its moment, and take out those that are over; returns how many tokens the
        requests got that were there from the start.
        """
        known = self._engine.scheduler.table.known.tolist()
        num_early, some_ended = 0, False
        for line in running:  # inside what is timed: no more work than it needs
            sequence = line.sequence
            row = sequence.row
            if row < 0:  # it waits, or has ended
                length = sequence.tokens.size
                some_ended = some_ended or sequence.finish_reason is not None
            else:
                length = known[row]
            if length > line.length:
                line.moments.append(now)  # a step gives a sequence one token
                line.length = length
                num_early += line.is_early
        if some_ended:
            running[:] = [line for line in running if line.sequence.finish_reason is None]
        return num_early

    def _since_arrival(self, one: _Watched) -> list[tuple[float, ...]]:
        if one.refused is not None or any(request.error is not None for request in one.begun):
            return [()] * one.prepared.params.n
        arrival = one.begun[0].arrival_time
        return [tuple(moment - arrival for moment in line.moments) for line in one.lines]
