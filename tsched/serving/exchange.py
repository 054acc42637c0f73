"""One request for text, from its body to its last byte, as raw ASGI: a chunk of a stream is one `send`.

The request runs in the task of its connection. Whatever ends it early (the client left, a time is over, the server
stops) cancels that task with a reason, wherever it waits: so there is one way to clean up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tsched.requests.errors import RefusedError
from tsched.requests.structured_outputs import StructuredOutputsParams
from tsched.serving.admission import Refused, Ticket
from tsched.serving.auth import Tenant
from tsched.serving.body import CLIENT_GONE, ClientGoneError, read_body
from tsched.serving.engine_client import (
    Delta,
    DeltaStream,
    EngineFailedError,
    EngineUnavailableError,
    RequestRefusedError,
)
from tsched.serving.front_end import FrontEnd
from tsched.serving.protocol.errors import ApiError, engine_failure, internal_failure, invalid_value, unavailable
from tsched.serving.protocol.json_body import parse_request
from tsched.serving.protocol.sampling import GenerationRequest
from tsched.serving.requests import (
    check_request,
    count_asked_outputs,
    count_completions,
    count_prompts,
    estimate_prompt_tokens,
    find_param,
    make_job,
    refuse,
)
from tsched.serving.responses import Answer, error_frame

LOG = logging.getLogger("tsched.serving")
_LOOK_S = 0.5  # between two looks at what a reader has left unread
_NUMBER_BYTES = 80  # of memory, of a token id or log-probability that waits
_JSON = [(b"content-type", b"application/json")]
_PING = b": ping\n\n"  # a comment, which clients skip: proxies cut a connection that is silent for long
_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in front passes every event on at once
]


@dataclass(slots=True)
class Outcome:
    """What became of a request, for the log.

    Attributes:
        status: Of the response; 499 where the client left before one.
        error: The code of its error.
        num_prompt_tokens: Of all prompts, once they are counted.
        num_completion_tokens: Made so far.
        finish_reasons: Of the completions that ended.
    """

    status: int = CLIENT_GONE
    error: str | None = None
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)


class Exchange(Response):
    """Answers one request for text.

    Args:
        front: The server.
        kind: The record of the API that was asked.
        tenant: Who asks.
    """

    def __init__(self, front: FrontEnd, kind: type[GenerationRequest], tenant: Tenant) -> None:
        self.background = None
        self.outcome = Outcome()
        self._front, self._kind, self._tenant = front, kind, tenant
        self._reason: ApiError | ClientGoneError | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._is_started = False  # the response, so its status is sent
        self._is_whole = False  # its last byte is sent
        self._sending_since: float | None = None
        self._streams: list[DeltaStream] = []
        self._finish_reasons: dict[int, list[str]] = {}  # of each prompt
        self._written_at = 0.0
        self._pinging: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._task = asyncio.current_task()
        self._send = scope.get("state", {}).get("send", send)
        scope.get("state", {})["outcome"] = self.outcome
        self._front.exchanges.add(self)
        self._meter = self._front.metrics.begin_request()
        try:
            await self._answer(scope, receive)
        except asyncio.CancelledError:
            if self._reason is None or self._task is None:
                raise
            self._task.uncancel()
            await self._fail(self._reason)
        except (ApiError, ClientGoneError) as error:
            await self._fail(error)
        except Exception:
            LOG.exception("a request failed")
            await self._fail(internal_failure())
        finally:
            self._front.exchanges.discard(self)  # first of all: a server that stops waits for it
            self._stop_timers()
            outcome = self.outcome
            self._meter.end(outcome.status, outcome.error, outcome.finish_reasons, outcome.num_prompt_tokens)

    def end(self, reason: ApiError | ClientGoneError) -> None:
        """Ends the request early; the first reason is said."""
        if self._reason is None and self._task is not None and not self._task.done():
            self._reason = reason
            self._task.cancel()

    async def _answer(self, scope: Scope, receive: Receive) -> None:
        front, limits = self._front, self._front.limits
        front.open_door()  # before a body is read for nothing
        seconds = asked_seconds(scope, limits.request_timeout)
        self._end_after("request", seconds, time_is_over(seconds))
        body = await read_body(scope, receive, limits)
        request, sampling = await front.process(len(body), self._read, body)
        self._request = request
        watcher = asyncio.create_task(self._watch(receive))
        try:
            ticket = self._admit(request)
            try:
                error = time_is_over(limits.queue_timeout, "no token came in time", "queue_timeout")
                self._end_after("queue", limits.queue_timeout, error)
                await self._read_form(request, sampling)
                await self._serve(request, sampling, ticket, len(body))
            except ApiError:
                ticket.refund()
                raise
            finally:
                ticket.give_back()
        finally:
            watcher.cancel()

    def _read(self, body: bytes) -> tuple[GenerationRequest, dict[str, Any]]:
        """The request that a body holds and its sampling parameters, checked."""
        request = parse_request(self._kind, body)
        return request, check_request(request, self._front.facts(), may_hurry=self._front.keys is None)

    def _admit(self, request: GenerationRequest) -> Ticket:
        """Lets the request in, before anything of it is tokenized; ApiError 429 says why not."""
        facts = self._front.facts()
        admitted = self._front.open_door().admit(
            self._tenant.name,
            count_completions(request),
            estimate_prompt_tokens(request, facts),
            count_asked_outputs(request, facts),
        )
        if isinstance(admitted, Refused):
            raise _blame(request, admitted) if admitted.retry_after is None else too_much(admitted)
        return admitted

    async def _read_form(self, request: GenerationRequest, sampling: dict[str, Any]) -> None:
        """Reads the form that the output must have, before anything is tokenized; ApiError where it is none."""
        if "structured_outputs" in sampling:
            try:
                await self._front.read_form(StructuredOutputsParams(**sampling["structured_outputs"]))
            except RefusedError as error:
                raise refuse(request, error) from None

    async def _serve(self, request: GenerationRequest, sampling: Any, ticket: Ticket, num_bytes: int) -> None:
        front = self._front
        parts = (request, sampling, front.facts(), front.codec, front.chats, self._tenant)
        job = await front.process(num_bytes, make_job, *parts)
        self.outcome.num_prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        num_outputs = job.n * sum(one.sampling["max_tokens"] for one in job.requests)
        refused = ticket.count(self.outcome.num_prompt_tokens, num_outputs)
        if refused is not None:
            raise _blame(request, refused, by_prompt=self.outcome.num_prompt_tokens > num_outputs)
        answer = Answer(job, front.codec)
        streams = self._streams
        try:
            streams += front.client.submit(*job.requests)
            self._let_start_over(True)
            async with aclosing(_merge(streams)) as deltas:
                await (self._stream if job.stream else self._gather)(answer, deltas, ticket)
        except RequestRefusedError as error:
            raise refuse(request, error) from None
        except EngineUnavailableError as error:
            raise unavailable(str(error), error.retry_after) from None
        except EngineFailedError as error:
            raise engine_failure(str(error)) from None
        finally:
            for stream in streams:
                await stream.aclose()

    async def _gather(self, answer: Answer, deltas: AsyncIterator[tuple[int, Delta]], ticket: Ticket) -> None:
        choices: list[dict[str, Any]] = []
        async for place, delta in deltas:
            if delta.starts_over:
                answer.start_over(place)
                choices = [one for one in choices if one["index"] // answer.job.n != place]
            self._take_note(place, delta, ticket)
            choices += answer.write_choices(place, delta)
            self.outcome.num_completion_tokens = answer.num_completion_tokens
        await self._respond(200, _JSON, answer.make_body(choices))

    async def _stream(self, answer: Answer, deltas: AsyncIterator[tuple[int, Delta]], ticket: Ticket) -> None:
        self._end_stalled()
        self._written_at = asyncio.get_running_loop().time()
        self._ping_silent()
        async for place, delta in deltas:
            if delta.starts_over:
                answer.start_over(place)
            self._take_note(place, delta, ticket)
            chunks = answer.write_chunks(place, delta)
            self.outcome.num_completion_tokens = answer.num_completion_tokens
            if chunks:
                self._let_start_over(False)
                if not self._is_started:  # by a ping
                    await self._start(200, _STREAM)
                await self._write(chunks)
        await self._write(answer.end_stream(), more=False)

    def _let_start_over(self, may: bool) -> None:
        """Another worker may serve the request anew, as long as its client was sent nothing."""
        for stream in self._streams:
            stream.may_start_over = may

    def _take_note(self, place: int, delta: Delta, ticket: Ticket) -> None:
        """Notes that output of a prompt has come; raises ApiError where a completion failed."""
        self._meter.take(place, delta)
        if "queue" in self._timers:
            self._timers.pop("queue").cancel()
            ticket.start()
        reasons = [sample.finish_reason for sample in delta.samples if sample.finish_reason is not None]
        if delta.starts_over:
            self._finish_reasons.pop(place, None)
        if reasons:
            self._finish_reasons.setdefault(place, []).extend(reasons)
        if reasons or delta.starts_over:
            self.outcome.finish_reasons = [*chain.from_iterable(self._finish_reasons.values())]
        if delta.error is not None and delta.at_fault is not None:
            raise refuse(self._request, RequestRefusedError(delta.error, delta.at_fault), "unsatisfiable")
        if delta.error is not None or "error" in reasons:
            raise engine_failure(delta.error or "the engine failed at this request")
        if "abort" in reasons:
            raise unavailable("the request was aborted by the server", 1.0)

    async def _watch(self, receive: Receive) -> None:
        """Ends the request when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGoneError())

    def _stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        if self._pinging is not None:
            self._pinging.cancel()

    def _end_after(self, name: str, seconds: float, error: ApiError) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self.end, error)

    def _end_stalled(self) -> None:
        """Ends the request where its reader has left a full connection unread for too long, or too much; asks again."""
        loop, limits = asyncio.get_running_loop(), self._front.limits
        if self._sending_since is not None and (
            loop.time() - self._sending_since >= limits.write_timeout
            or sum(one.num_unread for one in self._streams) * _NUMBER_BYTES > limits.max_unread_bytes
        ):
            self.end(ClientGoneError())
        else:
            self._timers["write"] = loop.call_later(min(_LOOK_S, limits.write_timeout / 4), self._end_stalled)

    def _ping_silent(self) -> None:
        """Writes a comment where nothing was written for ping_interval; asks again."""
        loop, interval = asyncio.get_running_loop(), self._front.limits.ping_interval
        silence = loop.time() - self._written_at
        if silence >= interval:
            silence = 0.0
            if self._sending_since is None:  # else bytes wait to be read
                self._pinging = loop.create_task(self._ping())
        self._timers["ping"] = loop.call_later(interval - silence, self._ping_silent)

    async def _ping(self) -> None:
        if not self._is_started:
            await self._start(200, _STREAM)
        await self._write(_PING)

    async def _fail(self, error: ApiError | ClientGoneError) -> None:
        """Says the error where somebody may hear it: as a response, or as a stream's last event."""
        self._stop_timers()
        if isinstance(error, ClientGoneError):
            self.outcome.error = "client_gone"
            return
        self.outcome.error = error.code
        if self._is_whole:
            return
        with suppress(TimeoutError):  # of a reader who leaves a full connection unread
            async with asyncio.timeout(self._front.limits.write_timeout):
                if not self._is_started:
                    headers = [*_JSON, *((name.encode(), value.encode()) for name, value in error.headers.items())]
                    await self._respond(error.status, headers, error.body)
                else:
                    await self._write(error_frame(error), more=False)

    async def _respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._write(body, more=False)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._is_started, self.outcome.status = True, status
        message: Message = {"type": "http.response.start", "status": status, "headers": list(headers)}
        await self._send(message)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        self._sending_since = self._written_at = asyncio.get_running_loop().time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        if more:  # else nothing may follow, not even a comment
            self._sending_since = None
        else:
            self._is_whole = True


async def _merge(streams: Sequence[DeltaStream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """(place, delta) of all streams as they come; an error of one ends all."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    # What nobody takes waits in the streams, where it is joined and counted.
    news: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(len(streams))

    async def read(place: int, stream: DeltaStream) -> None:
        try:
            async for delta in stream:
                await news.put((place, delta))
        except Exception as error:
            await news.put(error)

    readers = [asyncio.create_task(read(place, stream)) for place, stream in enumerate(streams)]
    try:
        num_left = len(streams)
        while num_left:
            found = await news.get()
            if isinstance(found, Exception):
                raise found
            yield found
            num_left -= found[1].is_last
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def too_much(refused: Refused) -> ApiError:
    """The error of a request that the door does not let in: 429, or 400 where it is above a bound by itself."""
    if refused.retry_after is None:
        return invalid_value(refused.message, None)
    return ApiError(429, refused.message, refused.reason, kind="rate_limit_error", retry_after=refused.retry_after)


def time_is_over(
    seconds: float, message: str = "the request's time is over", code: str = "request_timeout"
) -> ApiError:
    """504, with the seconds that there were."""
    return ApiError(504, f"{message} ({seconds:g} s)", code, kind="timeout_error")


def _blame(request: GenerationRequest, refused: Refused, *, by_prompt: bool = False) -> ApiError:
    """The error of a request that is above a bound by itself, most of it by its prompt or not."""
    if refused.reason != "in_flight":
        return invalid_value(refused.message, find_param(request, "prompt" if by_prompt else "max_tokens"))
    num_prompts, n = count_prompts(request), request.n or 1
    if num_prompts == 1:
        return invalid_value(refused.message, "n")
    message = f"{refused.message}: {num_prompts} prompts with n = {n}"
    return invalid_value(message, "prompt" if num_prompts >= n else "n")


def asked_seconds(scope: Scope, longest: float) -> float:
    """The time that the header x-request-timeout asks for, at most the server's own; ApiError where it is none."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-timeout"), None)
    if given is None:
        return longest
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise invalid_value("the header x-request-timeout must be seconds above 0", "x-request-timeout")
    return min(seconds, longest)
