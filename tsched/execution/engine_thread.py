"""The thread that runs an online engine, and the news of its requests that it hands on after each step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from tsched.execution.engine import Engine
from tsched.execution.news import News, Ticket
from tsched.execution.request import (
    Request,
    count_cached_tokens,
    extend_text,
    joint_error,
    joint_metrics,
    label_places,
)
from tsched.requests.errors import RefusedError, RequestFault
from tsched.requests.prompts import PreparedRequest
from tsched.requests.token_texts import TokenTexts
from tsched.scheduling.sequence import Ints
from tsched.torch_free import TKernelsError

ALL = slice(None)
_IDLE_S = 1.0  # seconds after which an idle thread checks whether anybody can still submit requests


@dataclass(eq=False, slots=True)
class _Sample:
    """An unfinished sample: of whom it is, and what has been told of it."""

    ticket: Ticket
    index: int
    request: Request
    num_told: int = 0  # tokens
    num_shown: int = 0  # characters, where the engine looks for stop strings in them
    wants_logprobs: bool = False
    stops_at_text: bool = False
    append: Callable[[int], str] | None = None  # the detokenizer's, once nothing else is told of it
    logprob_sum: float = 0.0
    has_no_text: bool = False  # the tokenizer failed

    @property
    def has_plain_news(self) -> bool:
        """Whether its tokens and their text are all that it tells until its end."""
        return not (self.has_no_text or self.wants_logprobs or self.stops_at_text)


class NobodyListensError(TKernelsError, RuntimeError):
    """Whoever took the news is gone: the thread ends, and the engine has not failed."""


class EngineThread:
    """Runs `engine` until it is told to stop, or until a step raises.

    The thread's own time a step grows with the samples that run or ended, not with those that wait.

    Args:
        engine: What runs.
        start: Queues a prepared request, one engine request for each sample; it may raise RefusedError.
        texts: Labels the tokens of log-probabilities; None leaves them without labels.
        on_news: Called on the thread after each step that brought some, with the news of all requests in one list. A
            request's last news has `is_last`; every submitted request gets it, also one that was refused, aborted, or
            caught by the thread's end. It raises NobodyListensError where nobody listens any more. All else that it
            raises ends the thread as its failure.
        on_end: Called on the thread, once, as its last act, after the last news: with the engine's exception, or None
            where the thread was told to stop. It raises NobodyListensError as `on_news`.
        is_abandoned: Whether nobody can submit requests or take news any more. The thread then aborts everything and
            ends within a second.
        name: Of the thread.

    Attributes:
        failure: The engine's exception that ended the thread.
        has_ended: Whether the thread takes no more requests.
        stats: The engine's, as of the last step or abort: before its news, one whole record that any thread may read.
    """

    def __init__(
        self,
        engine: Engine,
        start: Callable[[PreparedRequest], list[Request]],
        texts: TokenTexts | None,
        *,
        on_news: Callable[[list[News]], object],
        on_end: Callable[[BaseException | None], object],
        is_abandoned: Callable[[], bool] = lambda: False,
        name: str = "engine",
    ) -> None:
        self.failure: BaseException | None = None
        self.has_ended = False
        self.stats = engine.stats()
        self._engine = engine
        self._start = start
        self._texts = texts
        self._on_news = on_news
        self._on_end = on_end
        self._is_abandoned = is_abandoned
        self._samples: dict[int, _Sample] = {}  # by sequence id
        self._ended: list[Request] = []  # since the last report
        self._refused: list[News] = []  # since the last report
        num_rows = engine.scheduler.table.num_rows
        # By row of the scheduler's table, as of the last report: whose it is, and how many tokens were told of it.
        self._by_row: list[_Sample | None] = [None] * num_rows
        self._epochs: Ints = np.full(num_rows, -1, dtype=np.int64)
        self._told: Ints = np.zeros(num_rows, dtype=np.int64)  # with the prompt's
        self._lock = threading.Lock()
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._active: dict[Ticket, None] = {}  # whose last news is to come; others add under the lock
        self._calls: set[Future[int]] = set()  # under the lock: those that nobody has answered
        self._stops_when_idle = False
        self._must_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, *tickets: Ticket) -> None:
        """Begins requests, all before the same step. Any thread may call this.

        Raises:
            RuntimeError: The engine's thread has ended.
        """
        with self._lock:  # the ending thread ends all tickets under it, so none can slip in after
            if self.has_ended:
                raise RuntimeError("the engine's thread has ended")
            self._active.update(dict.fromkeys(tickets))

        def begin() -> None:
            for ticket in tickets:
                self._begin(ticket)

        grammars = [ticket.prepared.grammar for ticket in tickets if ticket.prepared.grammar is not None]
        _call_when_done(grammars, partial(self._commands.put, begin))

    def abort(self, ticket: Ticket) -> None:
        """Ends a request in whatever state it is. Any thread may call this at any moment, also after its end."""
        self._commands.put(lambda: self._abort(ticket))

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

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, or for `timeout` seconds."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
        self.stats = self._engine.stats()
        with self._lock:
            self.has_ended = True
            left, self._active = list(self._active), {}  # also tickets that never began
        for answer in self._calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(RuntimeError("the engine's thread has ended"))
        reason = "abort" if self.failure is None else "error"
        why = None if self.failure is None else f"the engine failed: {type(self.failure).__name__}: {self.failure}"
        for ticket in left:
            ticket.failure = self.failure
        news = [one for ticket in left for one in self._tell_ends(ticket, reason, why)]
        with suppress(NobodyListensError):
            try:
                if news:
                    self._on_news(news)
            except NobodyListensError:
                raise
            except BaseException as error:
                self.failure = self.failure or error
            self._on_end(self.failure)

    def _serve(self) -> None:
        engine, commands = self._engine, self._commands
        while not self._must_stop.is_set() and not self._is_abandoned():
            while not commands.empty():
                commands.get()()
            if engine.has_unfinished and not self._must_stop.is_set():
                self._ended += engine.step()
            self._report()
            if not engine.has_unfinished and not self._must_stop.is_set():
                if self._stops_when_idle and not self._active:  # some may wait for their grammars
                    return
                self._wait()
        for ticket in list(self._active):
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
        if ticket not in self._active:  # aborted while its grammar was compiled
            return
        try:
            ticket.requests = self._start(ticket.prepared)
        except RefusedError as error:
            ticket.refusal = str(error)
            self._refused += self._tell_ends(ticket, "error", ticket.refusal)
            del self._active[ticket]
            return
        ticket.num_going = len(ticket.requests)
        for index, request in enumerate(ticket.requests):
            wants_logprobs, stops_at_text = request.sequence.params.logprobs is not None, request.stops_at_text
            self._samples[request.sequence.id] = _Sample(
                ticket, index, request, wants_logprobs=wants_logprobs, stops_at_text=stops_at_text
            )

    def _abort(self, ticket: Ticket) -> None:
        if not ticket.requests and ticket in self._active:  # its grammar is being compiled
            self._refused += self._tell_ends(ticket, "abort", None)
            del self._active[ticket]
        for request in ticket.requests:
            if request.finish_time is None and self._engine.abort(request.sequence.id) is not None:
                self._ended.append(request)

    def _stop_when_idle(self) -> None:
        self._stops_when_idle = True

    def _report(self) -> None:
        """Hands on the news since the last report: new tokens, ends, refusals."""
        news, self._refused = self._refused, []
        self.stats = self._engine.stats()
        with self._engine.phases.detokenize:
            self._report_running(news)
            ended, self._ended = self._ended, []  # with those whose texts just failed
            for request in ended:
                sample, sequence = self._samples.pop(request.sequence.id), request.sequence
                tokens = sequence.tokens[sequence.prompt_len + sample.num_told :].tolist()
                news.append(self._tell(sample, tokens, is_over=True))
        if news:
            try:
                self._on_news(news)
            except NobodyListensError:
                self._must_stop.set()

    def _report_running(self, news: list[News]) -> None:
        """Adds the news of the samples that have a row of the scheduler's table; only they have new tokens."""
        table = self._engine.scheduler.table
        rows = self._engine.scheduler.running
        for row in rows[table.epoch[rows] != self._epochs[rows]].tolist():
            self._enter_row(row)
        known = table.known[rows]
        counts = known - self._told[rows]  # new tokens
        if not counts.all():  # prompts are being computed
            fresh = counts > 0
            rows, known, counts = rows[fresh], known[fresh], counts[fresh]
        self._told[rows] = known
        if (counts == 1).all():
            tokens: list[list[int]] = table.tokens[rows, known - 1][:, None].tolist()
        else:
            ends = zip(rows.tolist(), (known - counts).tolist(), known.tolist(), strict=True)
            tokens = [table.tokens[row, begin:end].tolist() for row, begin, end in ends]
        by_row = self._by_row
        for row, new in zip(rows.tolist(), tokens, strict=True):
            sample = by_row[row]
            if sample is not None:
                news.append(self._tell(sample, new) if sample.append is None else self._tell_plainly(sample, new))

    def _enter_row(self, row: int) -> None:
        """Notes who has come into a row."""
        table = self._engine.scheduler.table
        sequence = table.sequences[row]
        if sequence is not None:
            sample = self._by_row[row] = self._samples[sequence.id]
            self._epochs[row] = table.epoch[row]
            self._told[row] = sequence.prompt_len + sample.num_told

    def _tell_plainly(self, sample: _Sample, token_ids: list[int]) -> News:
        """`_tell` of a sample that goes on, where a token and its text are all that is new: nearly always."""
        if sample.append is None or len(token_ids) != 1:
            return self._tell(sample, token_ids)
        try:
            text = sample.append(token_ids[0])
        except RequestFault as fault:
            text = ""
            self._fail_text(sample, fault)
        sample.num_told += 1
        ticket = sample.ticket
        return News(ticket, sample.index, token_ids, text, ticket.metrics)

    def _tell(self, sample: _Sample, token_ids: list[int], *, is_over: bool = False) -> News:
        """Makes the news of a sample's new tokens and, where it is over, of its end."""
        ticket, request = sample.ticket, sample.request
        have = sample.num_told
        sample.num_told = have + len(token_ids)
        news = News(ticket, sample.index, token_ids, "", ticket.metrics)
        if sample.wants_logprobs:
            news.scores, news.logprobs = [], None if self._texts is None else []
        if not sample.has_no_text:
            try:
                self._add_texts(news, sample, have, is_over)
            except RequestFault as fault:
                self._fail_text(sample, fault)
        if sample.wants_logprobs:
            news.logprob_sum = sample.logprob_sum
        if have and not is_over:
            return news
        if is_over:
            news.finish_reason, news.stop_reason = request.sequence.finish_reason or "abort", request.stop_reason
        elif sample.has_plain_news and request.detokenizer is not None:
            sample.append = request.detokenizer.append
        ticket.metrics = news.metrics = joint_metrics(ticket.requests)
        ticket.num_cached_tokens = count_cached_tokens(ticket.requests)
        ticket.num_going -= is_over
        if not ticket.num_going:
            del self._active[ticket]
            news.is_last, news.error = True, joint_error(ticket.requests)
        return news

    def _add_texts(self, news: News, sample: _Sample, have: int, is_over: bool) -> None:
        """Adds what is made of a sample's tokens from the one at place `have` on; RequestFault where that fails."""
        news.text = self._new_text(sample, news.token_ids, is_over)
        if sample.wants_logprobs:
            self._add_logprobs(news, sample, have)
        if not have:
            self._add_prompt_logprobs(news)

    def _new_text(self, sample: _Sample, token_ids: list[int], is_over: bool) -> str:
        """The text that a sample's new tokens make final; RequestFault where the tokenizer makes none."""
        request = sample.request
        detokenizer = request.detokenizer
        if detokenizer is None or not sample.stops_at_text:
            return extend_text(request, token_ids, is_over=is_over)
        text = detokenizer.text  # the engine has made it
        begin, sample.num_shown = sample.num_shown, len(text) if is_over else detokenizer.stable_len
        return text[begin : sample.num_shown]

    def _add_logprobs(self, news: News, sample: _Sample, have: int) -> None:
        """Adds the log-probabilities of a sample's tokens from the one at place `have` on."""
        places = sample.request.logprobs[have : sample.num_told]
        sample.logprob_sum += sum(place.logprobs[0] for place in places)
        news.scores = places
        if self._texts is not None:
            news.logprobs = label_places(places, self._texts)

    def _add_prompt_logprobs(self, news: News) -> None:
        """Adds the prompt's log-probabilities where they have not been told; they are known before any token is."""
        ticket = news.ticket
        scores = ticket.requests[0].prompt_scores
        if scores is None or ticket.has_told_prompt or not scores.is_complete:
            return
        if self._texts is not None:
            news.prompt_logprobs = [None, *label_places(scores.found, self._texts)]
        news.prompt_scores = scores.found
        ticket.has_told_prompt = True

    def _fail_text(self, sample: _Sample, fault: RequestFault) -> None:
        """Ends the request of a sample whose tokens have no text."""
        sample.has_no_text, sample.append = True, None
        self._fail(sample.request, str(fault))

    def _fail(self, request: Request, why: str) -> None:
        """Ends a request whose tokens have no text."""
        if request.finish_time is None and self._engine.abort(request.sequence.id) is not None:
            self._ended.append(request)
        request.fail(why)

    def _tell_ends(self, ticket: Ticket, reason: str, error: str | None) -> list[News]:
        """The news that end all samples of a request at once, of which the engine has none."""
        told = [sample.index for sample in self._samples.values() if sample.ticket is ticket]
        indices = told if ticket.requests else range(ticket.prepared.params.n)
        ticket.metrics = replace(ticket.metrics, finish_time=time.perf_counter())
        news = [News(ticket, i, [], "", ticket.metrics, finish_reason=reason) for i in indices]
        if ticket.prepared.params.logprobs is not None:
            for one in news:
                one.scores, one.logprobs = [], None if self._texts is None else []
        news[-1].is_last, news[-1].error = True, error
        return news


def _call_when_done(futures: Sequence[Future[Any]], act: Callable[[], object]) -> None:
    """Calls `act` once, by whom the last of `futures` is done; at once where all are."""
    if not futures:
        act()
    else:
        futures[0].add_done_callback(lambda _: _call_when_done(futures[1:], act))
