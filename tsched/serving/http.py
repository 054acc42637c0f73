"""uvicorn with deadlines, a drain, and errors in OpenAI's form where a request is not even HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from tsched.serving.front_end import FrontEnd
from tsched.serving.limits import ServerLimits
from tsched.serving.listening import BACKLOG, ServerStartError
from tsched.serving.protocol.errors import ApiError

_DROP_S = 2.0
_LAST_WORDS_S = 1.0
"""Seconds that the readers of a server that ends have for what is written."""


def serve(app: FastAPI, listening: socket.socket, on_ready: Callable[[FrontEnd], None] = lambda front: None) -> None:
    """Serves an app of `create_app` until SIGTERM, SIGINT or SIGHUP. The first lets running requests end, a second ends
    them.

    Args:
        app: The app.
        listening: Of `open_socket`.
        on_ready: Called once, when the model is loaded.

    Raises:
        ServerStartError: The model cannot be loaded.
    """
    server = make_server(app)
    server.on_ready = on_ready
    server.run(sockets=[listening])
    error = server.front.load_error
    if error is not None:
        raise ServerStartError(f"the model cannot be served: {error}") from error


def make_server(app: FastAPI) -> DrainingServer:
    """uvicorn's server of an app of `create_app`."""
    front: FrontEnd = app.state.front_end
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        backlog=BACKLOG,
        timeout_keep_alive=front.limits.keep_alive_timeout,  # type: ignore[arg-type]  # it waits parts of a second too
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=front.limits.max_header_bytes,
    )
    return DrainingServer(config, front)


class DrainingServer(uvicorn.Server):
    """Goes on to answer while running requests end, and ends as soon as they have.

    Args:
        config: uvicorn's.
        front: The app's state.

    Attributes:
        front: As given.
        on_ready: Called once, when the model is loaded.
    """

    def __init__(self, config: uvicorn.Config, front: FrontEnd) -> None:
        super().__init__(config)
        self.front = front
        self.on_ready: Callable[[FrontEnd], None] = lambda front: None
        self._stopping: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._must_end = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals on the loop; uvicorn's own would raise them again at the end, for another exit status."""
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._follow_loading())
        handled: list[signal.Signals] = []
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if one == signal.SIGHUP and signal.getsignal(one) == signal.SIG_IGN:  # by nohup
                continue
            with contextlib.suppress(ValueError, RuntimeError):  # another thread than the main one has none
                loop.add_signal_handler(one, self.stop)
                handled.append(one)
        try:
            yield
        finally:
            for one in handled:
                loop.remove_signal_handler(one)
            self._watching.cancel()

    def stop(self) -> None:
        """Lets running requests end, then ends; called again, ends them."""
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        else:
            self._must_end.set()

    async def _stop(self) -> None:
        await self.front.drain()
        self._must_end.set()

    async def _follow_loading(self) -> None:
        await self.front.is_loaded.wait()
        if self.front.load_error is not None:
            self._must_end.set()
        elif not self.front.is_draining:
            self.on_ready(self.front)

    async def main_loop(self) -> None:
        """Ends at once; uvicorn's own looks ten times a second whether to end."""
        ticking = asyncio.create_task(super().main_loop())
        await self._must_end.wait()
        ticking.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends what is in work, with an error that says so, before uvicorn waits for it; what is unread is lost."""
        cutting = asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._cut_connections)
        await self.front.end_all()
        closing = asyncio.create_task(self.front.client.close())  # while uvicorn closes the connections
        await super().shutdown(sockets)
        await closing
        cutting.cancel()

    def _cut_connections(self) -> None:
        """Ends the connections that are left: to be closed, they would have to be read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class DeadlineProtocol(H11Protocol):
    """h11's protocol with deadlines: for a request's headers, for what still comes of a body after its answer, and for
    a reader who leaves what is written unread.

    A connection that is closed while bytes arrive is reset, and its client may lose the answer. So what comes after a
    refusal is read and dropped, for a while.
    """

    _deadline: asyncio.TimerHandle | None = None  # of headers
    _dropping: asyncio.TimerHandle | None = None  # of what is dropped
    _unread: asyncio.TimerHandle | None = None  # of a connection that is full
    _is_refused = False

    @property
    def _limits(self) -> ServerLimits:
        limits: ServerLimits = self.config.app.state.front_end.limits  # type: ignore[union-attr]
        return limits

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._limits.header_timeout, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        is_between = self.conn.their_state is h11.IDLE
        if not is_between and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif is_between and self._deadline is None and self.conn.trailing_data[0]:
            self._deadline = self.loop.call_later(self._limits.header_timeout, self.transport.close)
        if self._dropping is not None and self.conn.their_state is not h11.SEND_BODY:
            self._dropping.cancel()
            self._dropping = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._dropping = self.loop.call_later(_DROP_S, self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread(self.transport.get_write_buffer_size(), self.loop.time())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _watch_unread(self, size: int, since: float) -> None:
        """Aborts the connection where `size` bytes have not become fewer for write_timeout; looks again else."""
        now, left = self.loop.time(), self.transport.get_write_buffer_size()
        if left != size:
            size, since = left, now
        if now - since >= self._limits.write_timeout:
            self.transport.abort()  # to be closed, it would have to be read
        else:
            self._unread = self.loop.call_later(self._limits.write_timeout / 4, self._watch_unread, size, since)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._dropping, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answers what h11 refuses; called where it raised."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if hint == 431:
            error = ApiError(431, f"the headers may have {self._limits.max_header_bytes} bytes", "headers_too_large")
        else:
            error = ApiError(400, f"this is no HTTP request: {msg}", "invalid_http")
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        headers = [("content-type", "application/json"), ("content-length", str(len(error.body)))]
        response = h11.Response(
            status_code=error.status, headers=[*headers, ("connection", "close")], reason=b"Refused"
        )
        for event in (response, h11.Data(data=error.body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        self.transport.write_eof()
        self._dropping = self.loop.call_later(_DROP_S, self.transport.close)
