"""The thread that runs an online engine, and the tokens that it leaves for each request's consumer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tsched.execution.engine import Engine, Request
from tsched.execution.sampler import TokenLogprobs
from tsched.requests.errors import RefusedError
from tsched.requests.prompts import PreparedRequest

ALL = slice(None)
_IDLE_S = 1.0  # seconds after which an idle thread checks whether anybody can still submit requests


@dataclass(eq=False, slots=True)
class NewTokens:
    """The tokens of one sample of a request since its consumer last took them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way through the engine.

    `news`, `refusal`, `failure` and `is_over` are read and written under the thread's lock. The engine's thread alone
    uses the rest.

    Attributes:
        prepared: The request as submitted.
        news: The new tokens of each sample.
        requests: The engine's request of each sample.
        num_reported: The tokens of each sample that `news` has had.
        num_going: Samples whose end has not been reported.
        refusal: Why the engine never took the request.
        failure: The engine's exception while it served the request.
        is_over: No more news will come.
    """

    prepared: PreparedRequest
    news: list[NewTokens]
    requests: list[Request] = field(default_factory=list)
    num_reported: list[int] = field(default_factory=list)
    num_going: int = 0
    refusal: str | None = None
    failure: BaseException | None = None
    is_over: bool = False


class EngineThread:
    """Runs `engine` until it is told to stop, or until a step raises.

    The thread's own time a step grows with the samples that run or ended, not with those that wait.

    Args:
        engine: What runs.
        start: Queues a prepared request, one engine request for each sample; it may raise RefusedError.
        on_news: Called on the thread after steps that brought tokens and when the thread ends. It raises RuntimeError
            where nobody listens any more.
        is_abandoned: Whether nobody can submit requests or take tokens any more. The thread then aborts everything and
            ends within a second.
        name: Of the thread.

    Attributes:
        failure: The engine's exception that ended the thread.
        has_ended: Whether the thread has ended.
    """

    def __init__(
        self,
        engine: Engine,
        start: Callable[[PreparedRequest], list[Request]],
        on_news: Callable[[], object],
        is_abandoned: Callable[[], bool],
        name: str,
    ) -> None:
        self.failure: BaseException | None = None
        self.has_ended = False
        self._engine = engine
        self._start = start
        self._on_news = on_news
        self._is_abandoned = is_abandoned
        self._samples: dict[int, tuple[Ticket, int]] = {}  # sequence id -> ticket and sample, of unfinished samples
        self._ended: list[Request] = []  # since the last report
        self._lock = threading.Lock()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Under the lock: tickets that are not over, in the order of arrival; and those with news for their consumers.
        self._active: dict[Ticket, None] = {}
        self._changed: dict[Ticket, None] = {}
        self._calls: set[Future[int]] = set()  # under the lock: those that nobody has answered
        self._is_notified = False  # on_news was called since the last changed()
        self._stops_when_idle = False
        self._must_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Begins a request. Any thread may call this.

        Raises:
            RuntimeError: The engine's thread has ended.
        """
        with self._lock:  # the ending thread ends all tickets under it, so none can slip in after
            if self.has_ended:
                raise RuntimeError("the engine's thread has ended")
            self._active[ticket] = None
            self._commands.put(lambda: self._begin(ticket))

    def abort(self, ticket: Ticket, samples: slice = ALL) -> None:
        """Ends a request, or some of its samples, in whatever state it is.

        Any thread may call this at any moment, also after its end.
        """
        self._commands.put(lambda: self._abort(ticket, samples))

    def call(self, act: Callable[[], int]) -> Future[int]:
        """Calls `act` on the thread between two steps. Any thread may call this.

        Returns:
            What it returned or raised; RuntimeError where the thread ends first.

        Raises:
            RuntimeError: The engine's thread has ended.
        """
        answer: Future[int] = Future()

        def run() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(act())
                except BaseException as error:
                    answer.set_exception(error)
            with self._lock:
                self._calls.discard(answer)

        with self._lock:
            if self.has_ended:
                raise RuntimeError("the engine's thread has ended")
            self._calls.add(answer)
            self._commands.put(run)
        return answer

    def drain(self) -> None:
        """Ends the thread once everything submitted is over."""
        self._commands.put(self._stop_when_idle)

    def close(self) -> None:
        """Aborts everything and ends the thread."""
        self._commands.put(self._must_stop.set)

    def join(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def take_changed(self) -> list[Ticket]:
        """Returns the tickets with news since the last call."""
        with self._lock:
            tickets, self._changed, self._is_notified = list(self._changed), {}, False
        return tickets

    def take_news(self, ticket: Ticket) -> tuple[list[NewTokens], bool]:
        """Takes the ticket's news.

        Returns:
            (the new tokens of each sample, whether they are the last).
        """
        with self._lock:
            news, ticket.news = ticket.news, [NewTokens() for _ in ticket.news]
            self._changed.pop(ticket, None)  # its consumer has all news now
            return news, ticket.is_over

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            with self._lock:
                self.failure = error
        with self._lock:
            self.has_ended = True
            for ticket in self._active:  # also tickets that never began
                ticket.failure, ticket.is_over = self.failure, True
                for news in ticket.news:
                    news.finish_reason = news.finish_reason or "abort"
                self._changed[ticket] = None
            self._active.clear()
        for answer in self._calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(RuntimeError("the engine's thread has ended"))
        try:
            self._on_news()
        except RuntimeError:
            return  # the loop is closed, and its tasks with it

    def _serve(self) -> None:
        engine, commands = self._engine, self._commands
        while not self._must_stop.is_set() and not self._is_abandoned():
            while not commands.empty():
                commands.get()()
            if engine.has_unfinished and not self._must_stop.is_set():
                self._ended += engine.step()
            self._report()
            if not engine.has_unfinished and not self._must_stop.is_set():
                if self._stops_when_idle:
                    return
                self._wait()
        with self._lock:
            tickets = list(self._active)
        for ticket in tickets:
            self._abort(ticket)
        self._report()

    def _wait(self) -> None:
        """Waits for the next command and runs it; gives up after _IDLE_S."""
        try:
            command = self._commands.get(timeout=_IDLE_S)
        except Empty:
            return
        command()

    def _begin(self, ticket: Ticket) -> None:
        try:
            ticket.requests = self._start(ticket.prepared)
        except RefusedError as error:
            with self._lock:
                ticket.refusal, ticket.is_over = str(error), True
                self._changed[ticket] = None
                del self._active[ticket]
            return
        ticket.num_going = len(ticket.requests)
        ticket.num_reported = [0] * len(ticket.requests)
        self._samples |= {request.sequence.id: (ticket, i) for i, request in enumerate(ticket.requests)}

    def _abort(self, ticket: Ticket, samples: slice = ALL) -> None:
        for request in ticket.requests[samples]:
            if request.finish_time is None and self._engine.abort(request.sequence.id) is not None:
                self._ended.append(request)

    def _stop_when_idle(self) -> None:
        self._stops_when_idle = True

    def _report(self) -> None:
        """Reports new tokens and ends to the tickets, and calls `on_news` unless a call is pending."""
        scheduler = self._engine.scheduler
        running = [scheduler.table.sequences[row] for row in scheduler.running.tolist()]
        with self._lock:
            for sequence in running:
                if sequence is not None:
                    self._report_one(*self._samples[sequence.id])
            for request in self._ended:
                self._report_one(*self._samples.pop(request.sequence.id))
            self._ended.clear()
            must_notify = bool(self._changed) and not self._is_notified
            self._is_notified |= must_notify
        if must_notify:
            try:
                self._on_news()
            except RuntimeError:
                self._must_stop.set()

    def _report_one(self, ticket: Ticket, sample: int) -> None:
        """Adds the sample's new tokens to the ticket's news and, where it has ended, its end."""
        table, request, news = self._engine.scheduler.table, ticket.requests[sample], ticket.news[sample]
        sequence, have, is_over = request.sequence, ticket.num_reported[sample], request.finish_time is not None
        first = sequence.prompt_len + have
        if sequence.row >= 0:
            tokens = table.tokens[sequence.row, first : table.known[sequence.row]].tolist()
        else:
            tokens = sequence.tokens[first:].tolist()
        if not tokens and not is_over:
            return
        self._changed[ticket] = None
        news.token_ids += tokens
        news.logprobs += request.logprobs[have : have + len(tokens)]
        ticket.num_reported[sample] = have + len(tokens)
        if is_over:
            news.finish_reason = sequence.finish_reason or "abort"
            ticket.num_going -= 1
            if ticket.num_going == 0:
                ticket.is_over = True
                del self._active[ticket]
