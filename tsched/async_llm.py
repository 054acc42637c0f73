"""Online serving: `AsyncLLM` runs the engine in a thread of its own and hands out each request's output as it grows."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from functools import partial
from types import TracebackType
from typing import Any

from tkernels.errors import TKernelsError
from tsched.execution.engine_thread import EngineThread, NobodyListensError
from tsched.execution.news import News, Ticket
from tsched.execution.request import Request
from tsched.execution.served_model import ServedModel, Swaps
from tsched.requests.errors import ArgumentError, ArgumentTypeError, RefusedError, UsageError
from tsched.requests.outputs import CompletionOutput, RequestOutput, add_part
from tsched.requests.prompts import PreparedRequest, Prompt, Salt
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.vllm_names import take_unused_arguments


class EngineError(TKernelsError, RuntimeError):
    """The engine failed and serves no more; `__cause__` is what it raised."""


class AsyncLLM(ServedModel):
    """Serves requests as they come, on one event loop. `__init__` lists its options.

        async with AsyncLLM("path/to/Qwen3-0.6B") as llm:
            async for output in llm.add_request("a", "The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text, end="", flush=True)

    The engine runs in one thread, from `async with` or the first request on. What it makes for a request is kept until
    the request's consumer takes it. A slow consumer therefore loses nothing and delays nobody: it gets several tokens
    at once. The request's max_tokens bound what waits for it.

    A request ends early by `abort`, when its iterator is closed or dropped, and when the task that consumes it is
    cancelled, whatever it awaits then. A timeout around an output cancels too; RequestStream shows one that does not.
    Leaving `async with` aborts what is unfinished; `await drain()` before lets it finish.

    Where nobody closes this, the thread aborts what is unfinished and ends, soon after the loop was closed or the last
    reference to this and to its iterators was dropped.
    """

    _session: _Session | None = None  # from the first use on
    _is_closing = False
    _death_callbacks: tuple[Callable[[BaseException], object], ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: nobody has drained or closed this, and the engine has not failed."""
        return not self._is_closing and (self._session is None or not self._session.thread.has_ended)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return 0 if self._session is None else len(self._session.streams)

    async def __aenter__(self) -> AsyncLLM:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @take_unused_arguments
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: Salt = None,
    ) -> RequestStream:
        """Begins to serve `prompt` at once.

        Args:
            request_id: The caller's name for the request, unlike those of others that have not finished and that nobody
                has aborted.
            prompt: A text or token ids.
            params: None is SamplingParams().
            priority: Lower goes first, with order="priority".
            cache_salt: Only requests of one salt share cached prefixes.

        Returns:
            An iterator of the request's outputs, which are deltas, see RequestOutput. A request that cannot be served
            has one output, with finish_reason "error" and the reason in `error`. The iterator raises EngineError where
            the engine fails.

        Raises:
            ArgumentTypeError: An argument has another type.
            ArgumentError: An unfinished request has this name, or the priority is too large.
            UsageError: This was drained or closed, or serves another event loop.
            EngineError: The engine has failed.
        """
        if not isinstance(request_id, str):
            raise ArgumentTypeError(f"request_id must be a str, got {type(request_id).__name__}")
        if params is not None and not isinstance(params, SamplingParams):
            raise ArgumentTypeError(f"params must be SamplingParams, got {type(params).__name__}")
        session = self._open()
        if request_id in session.tickets:
            raise ArgumentError(
                f"a request {request_id!r} is not finished yet; names of unfinished requests must differ"
            )
        ticket = self.make_ticket(
            request_id, prompt, params or SamplingParams(), priority=priority, cache_salt=cache_salt
        )
        (stream,) = self.submit(ticket)
        return stream

    def submit(self, *tickets: Ticket) -> list[RequestStream]:
        """Begins to serve requests that `make_ticket` has made, all before the same step of the engine.

        Their names are unlike each other and unlike those of unfinished requests, and str. Otherwise as `add_request`.
        """
        session = self._open()
        streams = [RequestStream(self, session, ticket) for ticket in tickets]
        try:
            session.thread.submit(*tickets)
        except RuntimeError:  # it failed since we looked
            raise _engine_error(session.thread.failure) from session.thread.failure
        for ticket, stream in zip(tickets, streams, strict=True):
            session.streams[ticket] = weakref.ref(stream)
            session.tickets[str(ticket.prepared.request_id)] = ticket
        return streams

    @take_unused_arguments
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: Salt = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serves `prompt`, from the first output that is asked for on.

        Args:
            prompt: As in `add_request`, like `priority`, `cache_salt` and what is raised.
            sampling_params: None is SamplingParams().
            request_id: The caller's name for the request, unlike those of other unfinished requests; None is a number.

        Yields:
            The request's output so far, each time that there is more of it: the last has all of it.
        """
        if request_id is None:
            request_id = str(next(self._request_ids))
        stream = self.add_request(request_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt)
        whole = None
        try:
            async for part in stream:
                whole = add_part(whole, part)
                yield whole
        finally:
            await stream.aclose()

    @take_unused_arguments
    def abort(self, request_id: str | Iterable[str]) -> Awaitable[None]:
        """Ends a request, or each of several, wherever it is. Its iterator gives what it had, with finish_reason
        "abort". Nothing happens where no unfinished request has this name.

        Returns:
            What may be awaited, as vLLM's callers do, and need not.
        """
        session = self._session
        for name in (request_id,) if isinstance(request_id, str) else request_id:
            if session is not None and name in session.tickets:
                session.abort(session.tickets[name])
        return _Nothing()

    async def swap_kernels(self, choices: Swaps) -> int:
        """Changes kernels while requests are served: `await llm.swap_kernels({"paged_decode": "split_kv"})`.

        The variants are selected, and weights prepared for them, while the engine runs; the swap comes between two
        steps. Steps before the one whose number this returns ran over the old kernels, and that one and all after it
        run over the new ones. Requests go on over the caches that they have. Graphs are recorded again as they
        are used.

        Args:
            choices: As the option `kernels`. An op that it leaves out keeps its variant; None asks for the default.

        Returns:
            The number of the first step that they run; the engine's first is 0.

        Raises:
            tkernels.SelectionError: A name is unknown, or a variant cannot serve this model; nothing has changed then.
            UsageError: This was drained or closed, or serves another event loop.
            EngineError: The engine has failed.
        """
        session = self._open()
        async with session.swapping:  # the next one goes out from what this one leaves
            swap = await asyncio.to_thread(self.plan_swap, choices)
            try:
                return await asyncio.wrap_future(session.thread.call(swap))
            except RuntimeError:
                if not session.thread.has_ended:
                    raise  # the swap's own
                raise _engine_error(session.thread.failure) from session.thread.failure

    async def drain(self) -> None:
        """Takes no more requests, lets the unfinished ones finish, and closes.

        Outputs that nobody has taken yet stay with their iterators.

        Raises:
            EngineError: The engine failed.
        """
        self._is_closing = True
        if self._session is not None:
            self._session.thread.drain()
            await self._session.wait()
            if self._session.thread.failure is not None:
                raise _engine_error(self._session.thread.failure)

    async def close(self, timeout: float | None = None) -> None:
        """Takes no more requests, aborts the unfinished ones and ends the engine's thread.

        Args:
            timeout: Seconds to wait for the step that runs; None is for ever.

        Raises:
            TimeoutError: The step goes on. Iterators raise EngineError then; the thread ends with the step, or with the
                process.
        """
        self._is_closing = True
        if self._session is not None:
            self._session.thread.close()
            try:
                await asyncio.wait_for(self._session.wait(), timeout)
            except TimeoutError:
                late = TimeoutError(f"the engine's step did not end in {timeout:g} s")
                self._session.give_up(late)
                raise late from None

    def add_death_callback(self, callback: Callable[[BaseException], object]) -> None:
        """Calls `callback` on the event loop, once, with the engine's exception when it fails.

        It is called soon where the engine has failed already, and never where this is closed before.
        """
        self._death_callbacks = (*self._death_callbacks, callback)
        failure = None if self._session is None else self._session.thread.failure
        if self._session is not None and failure is not None and self._session.has_ended:
            self._session.loop.call_soon(callback, failure)

    def _open(self) -> _Session:
        """The session of this loop; the first call begins it."""
        loop = asyncio.get_running_loop()
        if self._session is not None and loop is not self._session.loop:
            raise UsageError("an AsyncLLM serves one event loop, and this is another than its first")
        if self._is_closing:
            raise UsageError("this AsyncLLM was drained or closed and takes no more requests")
        if self._session is None:
            self._session = _Session(self)
            self._thread = self._session.thread
        if self._session.thread.failure is not None:
            raise _engine_error(self._session.thread.failure)
        return self._session


class _Nothing:
    """Nothing to wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


class _Session:
    """An event loop, the engine's thread, and the streams on the loop that wait for the thread.

    The thread refers to this and to the engine. This refers to its owner weakly, so that the thread notices when nobody
    has the owner any more.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.loop = asyncio.get_running_loop()
        self._owner = weakref.ref(llm)
        self.streams: dict[Ticket, weakref.ref[RequestStream]] = {}  # of unfinished requests
        self.tickets: dict[str, Ticket] = {}  # by their names, until somebody aborts them
        self.swapping = asyncio.Lock()
        self._ended = asyncio.Event()
        self.thread = EngineThread(
            llm._engine,
            self._start,
            llm._texts,
            on_news=partial(self._call_soon, self._hand_out),
            on_end=partial(self._call_soon, self._note_end),
            is_abandoned=self._is_abandoned,
            name=f"engine of {llm.directory.name}",
        )

    def _call_soon(self, act: Callable[[Any], object], argument: Any) -> None:
        """Has the loop call `act`; the thread does."""
        try:
            self.loop.call_soon_threadsafe(act, argument)
        except RuntimeError as error:  # it is closed, and its tasks with it
            raise NobodyListensError(str(error)) from error

    @property
    def has_ended(self) -> bool:
        """Whether the loop has heard of the thread's end."""
        return self._ended.is_set()

    def abort(self, ticket: Ticket) -> None:
        """Ends a request that has not ended. Another may have its name from now on."""
        self.free_name(ticket)
        self.thread.abort(ticket)

    def free_name(self, ticket: Ticket) -> None:
        """Another request may have the name of this one."""
        name = str(ticket.prepared.request_id)
        if self.tickets.get(name) is ticket:
            del self.tickets[name]

    async def wait(self) -> None:
        """Waits until the thread has ended."""
        await self._ended.wait()
        self.thread.join()  # its last act was to say so

    def give_up(self, reason: BaseException) -> None:
        """Ends all streams for a thread that does not end."""
        streams, self.streams = self.streams, {}
        self.tickets.clear()
        for ticket, reference in streams.items():
            ticket.failure, stream = reason, reference()
            if stream is not None:
                stream._receive(News(ticket, 0, [], "", ticket.metrics, finish_reason="error", is_last=True))

    def _note_end(self, failure: BaseException | None) -> None:
        """The thread has ended, and the streams have all its news."""
        self._ended.set()
        owner = self._owner()
        if failure is not None and owner is not None:
            for callback in owner._death_callbacks:
                self.loop.call_soon(callback, failure)

    def _start(self, prepared: PreparedRequest) -> list[Request]:
        llm = self._owner()
        if llm is None:
            raise RefusedError("the AsyncLLM is gone")
        return llm._start(prepared)

    def _is_abandoned(self) -> bool:
        return self.loop.is_closed() or self._owner() is None

    def _hand_out(self, news: list[News]) -> None:
        """Hands a step's news to the streams and forgets requests that are over: another may have their names."""
        streams = self.streams
        for one in news:
            reference = streams.get(one.ticket)
            stream = None if reference is None else reference()
            if stream is not None:
                stream._receive(one)
            if one.is_last:
                streams.pop(one.ticket, None)
                self.free_name(one.ticket)


class RequestStream:
    """The outputs of one request, as an asynchronous iterator for one consumer at a time.

    A consumer that is cancelled while it waits for an output aborts the request. `asyncio.wait_for(anext(stream), 1)`
    and `asyncio.timeout` cancel at their timeouts, so they abort it too. A timeout of `asyncio.wait` cancels nothing;
    it lets a consumer do something else when a second has brought no output:

        following = asyncio.ensure_future(anext(stream))
        while not (await asyncio.wait({following}, timeout=1.0))[0]:
            print("nothing yet")  # or following.cancel(), which aborts the request
        output = await following
    """

    def __init__(self, llm: AsyncLLM, session: _Session, ticket: Ticket) -> None:
        self._llm = llm  # the engine serves as long as somebody has this
        self._loop = session.loop
        self._session = session
        self._ticket = ticket
        self._news: list[News] = []  # that the consumer has not taken
        self._waiter: asyncio.Future[None] | None = None  # done when there are some
        self._is_over = False
        self._consumer: asyncio.Task[Any] | None = None
        self._consumer_ended = partial(_consumer_ended, weakref.ref(self))

    @property
    def request_id(self) -> str:
        return str(self._ticket.prepared.request_id)

    @property
    def refusal(self) -> str | None:
        """Why the engine never took the request; None where it did, or has not yet."""
        return self._ticket.refusal

    @property
    def at_fault(self) -> str | None:
        """The field of SamplingParams that made the request fail; None where none did."""
        return self._ticket.at_fault

    @property
    def unread(self) -> list[CompletionOutput]:
        """What has come that the consumer has not taken."""
        return [news.completion for news in self._news]

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if self._waiter is not None:
            raise UsageError(f"two tasks wait for the next output of request {self.request_id!r}; one may")
        self._watch(asyncio.current_task())
        if not self._news:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self._session.abort(self._ticket)
                raise
            finally:
                self._waiter = None
        return self._take()

    async def aclose(self) -> None:
        """Aborts the request, unless it has finished, and ends the iteration. Its name is free then."""
        self._session.abort(self._ticket)
        self._end()

    def __del__(self) -> None:
        if not self._is_over:
            self._session.abort(self._ticket)
            self._end()

    def _watch(self, task: asyncio.Task[Any] | None) -> None:
        """Watches for the end of the task that consumes: it may be cancelled while it awaits something else."""
        if task is not self._consumer:
            if self._consumer is not None:
                self._consumer.remove_done_callback(self._consumer_ended)
            if task is not None:
                task.add_done_callback(self._consumer_ended)
            self._consumer = task

    def _end(self) -> None:
        self._is_over = True
        self._watch(None)

    def _receive(self, news: News) -> None:
        """Keeps news for the consumer, and wakes it where it waits."""
        self._news.append(news)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> RequestOutput:
        """All that has come since the last call, as one output."""
        news, self._news = self._news, []
        if news[-1].is_last:
            self._end()
            if self._ticket.failure is not None:
                raise _engine_error(self._ticket.failure)
        whole = None
        for one in news:
            whole = add_part(whole, self._make_part(one))
        assert whole is not None
        return whole

    def _make_part(self, news: News) -> RequestOutput:
        prepared = self._ticket.prepared
        return RequestOutput(
            prepared.request_id,
            prepared.text,
            prepared.token_ids,
            [news.completion],
            news.metrics,
            news.error,
            news.is_last,
            news.prompt_logprobs,
            self._ticket.num_cached_tokens,
        )


def _consumer_ended(stream: weakref.ref[RequestStream], task: asyncio.Task[Any]) -> None:
    """Aborts the request of a consumer that was cancelled. One that returned may have passed the stream on.

    A consumer that failed is not asked for its exception: asyncio would take it as handled. The stream that it held is
    dropped with it.
    """
    found = stream()
    if found is not None and not found._is_over and task.cancelled():
        found._session.abort(found._ticket)


def _engine_error(cause: BaseException | None) -> EngineError:
    """A new EngineError for each consumer: a traceback belongs to one raised exception."""
    what = "its event loop was closed" if cause is None else f"{type(cause).__name__}: {cause}"
    error = EngineError(f"the engine failed and serves no more: {what}")
    error.__cause__ = cause
    return error
