"""Serving a workload with the moment of every token on record: an LLM whose requests may come late, or in batches."""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import chain, compress, count

from experiments.schema import Batching
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from tsched import LLM, SamplingParams
from tsched.execution.request import Request as EngineRequest
from tsched.requests.errors import RefusedError
from tsched.requests.outputs import RequestOutput
from tsched.requests.prompts import PreparedRequest


@dataclass(frozen=True, kw_only=True)
class Timeline(Served):
    """A round as the engine served it: a token's moment is when the host had it. peak_running: the most sequences in
    one step.
    """

    outputs: tuple[RequestOutput, ...]
    peak_running: int


@dataclass(eq=False)
class _Completion:
    """One of a request's completions in the engine, with `length` tokens known. moments: on perf_counter's clock."""

    request: EngineRequest
    is_late: bool
    length: int
    moments: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Asked:
    """A request of the workload: prepared, then in the engine or refused by it."""

    prepared: PreparedRequest
    after: int
    completions: list[_Completion] = field(default_factory=list)
    refused: RequestOutput | None = None

    @property
    def moments(self) -> list[tuple[float, ...]]:
        """Of each completion, the seconds from the request's arrival to each token; none where the request failed."""
        if self.refused is not None or any(one.request.error is not None for one in self.completions):
            return [()] * self.prepared.params.n
        arrival = self.completions[0].request.arrival_time
        return [tuple(moment - arrival for moment in one.moments) for one in self.completions]


class _Arrivals:
    """The requests that have not come yet: those that are there from the start wait for their batch, others for these's
    tokens. early_tokens: how many tokens the completions of the first kind have.
    """

    def __init__(self, asked: Items[_Asked], batch_size: int) -> None:
        self.batch_size = batch_size
        self.early = deque(one for one in asked if not one.after)
        self.late = deque(sorted((one for one in asked if one.after), key=lambda one: one.after))
        self.num_early = sum(one.prepared.params.n for one in self.early)
        self.early_tokens = 0

    def __bool__(self) -> bool:
        return bool(self.early or self.late)

    def take_due(self, *, is_idle: bool) -> list[_Asked]:
        """Those that come now. is_idle: whether nobody is served any more; then somebody comes."""
        size = min(self.batch_size, len(self.early)) if is_idle else 0
        due = [self.early.popleft() for _ in range(size)]
        while self.late and (self.early_tokens >= self.late[0].after * self.num_early or (is_idle and not due)):
            due.append(self.late.popleft())
        return due


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
        engine, start = self._engine, time.perf_counter()
        asked = [_Asked(self._prepared(one, adapt(one.params), start, salt), one.after) for one in requests]
        batch_size = engine.scheduler.table.num_rows if batching == "static" else len(asked)
        arrivals = _Arrivals(asked, batch_size)
        running: list[_Completion] = []
        peak_running = 0
        try:
            while arrivals or engine.has_unfinished:
                for one in arrivals.take_due(is_idle=not engine.has_unfinished):
                    running += self._begin(one, time.perf_counter() if one.after else start)
                if engine.has_unfinished:  # the engine may have refused them all
                    num_finished = len(engine.step())
                    peak_running = max(peak_running, engine.scheduler.num_running + num_finished)
                    arrivals.early_tokens += self._note_tokens(running, time.perf_counter())
        except BaseException:
            for completion in running:
                engine.abort(completion.request.sequence.id)
            raise
        return self._timeline(asked, time.perf_counter() - start, peak_running)

    def _prepared(self, request: Request, params: SamplingParams, arrival: float, salt: str) -> PreparedRequest:
        return self._prepare(
            next(self._request_ids), request.prompt, params, arrival,
            priority=request.priority, cache_salt=f"{salt}, tenant {request.tenant}",
        )  # fmt: skip

    def _begin(self, one: _Asked, arrival: float) -> list[_Completion]:
        """Queues a request, which came at `arrival`; returns its completions, none where it is refused."""
        try:
            requests = self._start(one.prepared)
        except RefusedError as error:
            one.refused = self._make_refused_output(one.prepared, str(error), time.perf_counter())
            return []
        for request in requests:
            request.arrival_time = arrival
            one.completions.append(_Completion(request, one.after > 0, len(one.prepared.token_ids)))
        return one.completions

    def _note_tokens(self, running: list[_Completion], now: float) -> int:
        """Gives each new token of `running` its moment, and takes out those that are over; returns how many tokens the
        requests got that were there from the start.
        """
        known = self._engine.scheduler.table.known.tolist()
        num_early, some_ended = 0, False
        for one in running:  # inside what is timed: no more work than it needs
            sequence = one.request.sequence
            row = sequence.row
            if row < 0:  # it waits, or has ended
                length = sequence.tokens.size
                some_ended = some_ended or sequence.finish_reason is not None
            else:
                length = known[row]
            if length > one.length:
                one.moments.append(now)  # a step gives a sequence one token
                one.length = length
                num_early += not one.is_late
        if some_ended:
            running[:] = [one for one in running if one.request.sequence.finish_reason is None]
        return num_early

    def _timeline(self, asked: Items[_Asked], seconds: float, peak_running: int) -> Timeline:
        outputs = tuple(
            one.refused or self._output(one.prepared, [completion.request for completion in one.completions])
            for one in asked
        )
        are_late = [one.after > 0 for one in asked for _ in range(one.prepared.params.n)]
        return Timeline(
            tokens=tuple(chain.from_iterable(map(_list_tokens, outputs))),
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            seconds=seconds,
            moments=tuple(chain.from_iterable(one.moments for one in asked)),
            late=frozenset(compress(count(), are_late)),
            error=next((output.error for output in outputs if output.error is not None), None),
            outputs=outputs,
            peak_running=peak_running,
        )


def _list_tokens(output: RequestOutput) -> list[tuple[int, ...] | None]:
    """Each completion's tokens, None where the request failed."""
    return [tuple(one.token_ids) if output.error is None else None for one in output.outputs]
