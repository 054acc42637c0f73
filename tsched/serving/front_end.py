"""What the routes of one server share: the engine's client, the tokenizer, the counts at the door, the requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tsched.requests.chat_template import ChatEncoder, ChatTemplate, read_chat_template
from tsched.requests.grammar_reader import GrammarReader
from tsched.requests.structured_outputs import StructuredOutputsParams
from tsched.serving.admission import Admission
from tsched.serving.auth import Keys
from tsched.serving.engine_client import EngineClient, EngineUnavailableError, ModelFacts
from tsched.serving.limits import ServerLimits
from tsched.serving.metrics import Metrics
from tsched.serving.protocol.errors import ApiError, unavailable
from tsched.serving.text import TextCodec

if TYPE_CHECKING:
    from tsched.serving.exchange import Exchange

LOG = logging.getLogger("tsched.serving")
ResultT = TypeVar("ResultT")
_INLINE_BYTES = 1024  # a body this short is tokenized in less time than a thread takes to wake
_RETRY_S = 5.0  # when a server that stops may have been replaced


class FrontEnd:
    """One server's state, on one event loop.

    Args:
        client: The engine.
        limits: Every bound and time-out.
        keys: Who may ask; None lets everybody.
        chat_template: A file that takes the place of the model's own.

    Attributes:
        limits: As given; once the model is loaded, with the bounds that follow from it.
        metrics: What is counted and measured.
        codec: The model's tokenizer; None where it has none, or before it is loaded.
        template: Its chat template; the same.
        chats: What makes prompts of chats with it; the same.
        load_error: Why the model could not be loaded.
        is_draining: Whether the server stops: it takes no more requests.
        exchanges: The requests in work.
        pool: Threads that read large bodies and tokenize.
    """

    def __init__(
        self,
        client: EngineClient,
        limits: ServerLimits,
        keys: Keys | None = None,
        chat_template: Path | None = None,
    ) -> None:
        self.client, self.limits, self.keys = client, limits, keys
        self.metrics = Metrics(client)
        self.codec: TextCodec | None = None
        self.template: ChatTemplate | None = None
        self.chats: ChatEncoder | None = None
        self.load_error: BaseException | None = None
        self.is_draining = False
        self.exchanges: set[Exchange] = set()
        self.pool = ThreadPoolExecutor(limits.tokenizer_threads, thread_name_prefix="tokenize")
        self._forms, self._form_thread = GrammarReader(), ThreadPoolExecutor(1, thread_name_prefix="forms")
        self.is_loaded = asyncio.Event()  # or has failed to
        self._chat_template = chat_template
        self._admission: Admission | None = None
        self._loading: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begins to load the model; the server answers meanwhile."""
        self._loading = asyncio.create_task(self._load())
        self._measuring = asyncio.create_task(self.metrics.watch_loop())

    async def drain(self) -> None:
        """Takes no more requests, and returns when those in work have ended, at drain_timeout at the latest."""
        self.is_draining = True
        deadline = asyncio.get_running_loop().time() + self.limits.drain_timeout
        while self.exchanges and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    async def end_all(self) -> None:
        """Ends every request in work with an error that says so."""
        self.is_draining = True
        for exchange in list(self.exchanges):
            exchange.end(unavailable("the server stopped before the request ended", _RETRY_S))
        while self.exchanges:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Ends what is in work, and the engine."""
        await self.end_all()
        for task in (self._loading, self._measuring):
            if task is not None:
                task.cancel()
        await self.client.close()
        for pool in (self.pool, self._form_thread):
            pool.shutdown(wait=False, cancel_futures=True)

    def facts(self) -> ModelFacts:
        """Of the model; ApiError 503 before it is loaded."""
        try:
            return self.client.facts
        except EngineUnavailableError as error:
            raise unavailable(str(error), error.retry_after) from None

    def open_door(self) -> Admission:
        """The counts at the door.

        Raises:
            ApiError: 503, no request is taken now.
        """
        if self.is_draining:
            raise unavailable("the server stops and takes no more requests", _RETRY_S)
        if self.load_error is not None or self.client.state == "failed":
            # Nothing but a new server helps, so no time is said.
            raise ApiError(503, "the engine has failed", "engine_failed", kind="server_error")
        if self._admission is None:
            self.facts()
            raise unavailable("the model is being loaded", 1.0)
        try:
            self.client.check_open()
        except EngineUnavailableError as error:
            raise unavailable(str(error), error.retry_after) from None
        return self._admission

    async def process(self, num_bytes: int, work: Callable[..., ResultT], *parts: Any) -> ResultT:
        """Does what takes the longer the more bytes a body has: at once, or on a thread, and others are served."""
        if num_bytes <= _INLINE_BYTES:
            return work(*parts)
        return await asyncio.get_running_loop().run_in_executor(self.pool, work, *parts)

    async def read_form(self, form: StructuredOutputsParams) -> None:
        """Reads the form of an output; one that was read before takes no time. RefusedError says what is wrong."""
        if self._forms.knows(form):
            self._forms.read(form)
        else:
            await asyncio.get_running_loop().run_in_executor(self._form_thread, self._forms.read, form)

    def readiness(self) -> Mapping[str, Any]:
        """Whether requests are taken, and why not."""
        state: str = self.client.state
        if self.load_error is not None:
            state = "failed"
        elif self.is_draining:
            state = "draining"
        elif state == "ready" and self._admission is None:
            state = "loading"
        return {"status": state}

    def _read_tokenizer(self, directory: Path) -> None:
        self.codec = TextCodec(directory)
        self.template = read_chat_template(directory, self._chat_template)
        if self.template is not None:
            self.chats = ChatEncoder(self.codec.tokenizer, self.template)

    async def _load(self) -> None:
        try:
            await self.client.start()
            facts = self.client.facts
            if facts.tokenizer_directory is not None:
                await asyncio.to_thread(self._read_tokenizer, Path(facts.tokenizer_directory))
            limits = self.limits
            max_in_flight = limits.max_in_flight or 4 * facts.max_num_seqs
            max_waiting_tokens = limits.max_waiting_tokens or 2 * facts.num_cache_tokens
            self.limits = replace(limits, max_in_flight=max_in_flight, max_waiting_tokens=max_waiting_tokens)
            self._admission = Admission(
                max_in_flight, max_waiting_tokens, limits.requests_per_minute, limits.tokens_per_minute
            )
            LOG.info("the model %s is served", facts.name)
        except Exception as error:
            if not self.is_draining:  # else the engine was ended amid its loading
                self.load_error = error
                LOG.error("the model cannot be served: %s", error)
        finally:
            self.is_loaded.set()
