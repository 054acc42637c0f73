"""One life of a worker, as its front end sees it: started with a fresh interpreter, watched, and killed at the end.

Loads no torch. Nothing is pickled: the two speak by a link.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tsched.serving.link import LinkError, Message, encode_message, read_message

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from tsched.serving.worker import main
main(int(sys.argv[1]))
"""

_LAST_WORDS_S = 0.2
"""Seconds to wait, when the process or its link has ended, for the other: the messages before and the exit status."""


@dataclass(frozen=True)
class StartedWorker:
    """A worker's process, and our end of its link. The process ends when that is closed."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


def start_process() -> StartedWorker:
    """Starts a worker, which loads torch, and then waits for what to load at its end of the link.

    Raises:
        OSError: No process or no file is left.
    """
    ours, theirs = socket.socketpair()
    command = (sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path))
    # A session of its own: Ctrl-C is for the front end, which lets the worker finish.
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return StartedWorker(process, ours)


class WorkerProcess:
    """A worker from its start to its end.

    Args:
        started: Its process.
        on_message: Called with each message of it.
        on_end: Called once, with the reason, when it is no more: it ended, closed its link, or was killed here.

    Raises:
        OSError: It cannot be watched, as no file is left; it is ended.
    """

    def __init__(
        self, started: StartedWorker, on_message: Callable[[Message], None], on_end: Callable[[str], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._has_ended = False
        self._process, self._socket = started.process, started.socket
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            raise
        self._exited = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._watching: asyncio.Task[None] | None = None
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def open(self) -> None:
        """Opens the link; messages come from now on."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._watching = asyncio.create_task(self._watch(reader))

    def send(self, message: Message) -> None:
        """Sends a message; nothing happens where the worker is no more.

        Raises:
            LinkError: It is too long.
        """
        frame = encode_message(message)
        if self._writer is not None and not self._has_ended:
            self._writer.write(frame)

    def kill(self, reason: str) -> None:
        """Ends it at once, in any state."""
        if self._has_ended:
            return
        self._has_ended = True
        if not self._exited.is_set():
            self._process.kill()  # also one that is stopped
        if self._watching is not None:
            self._watching.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        self._on_end(reason)

    async def wait(self) -> None:
        """Waits until the process is gone."""
        await self._exited.wait()

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Reads the link to its end, or until the process has ended and its last messages are read."""
        reading = asyncio.create_task(self._read(reader))
        exiting = asyncio.create_task(self._exited.wait())
        try:
            await asyncio.wait({reading, exiting}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({reading, exiting}, timeout=_LAST_WORDS_S)
            fault = reading.exception() if reading.done() else None
        finally:
            reading.cancel()
            exiting.cancel()
        self.kill(self._describe_end() if fault is None else f"its link broke: {fault}")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader)) is not None:
            try:
                self._on_message(message)
            except (KeyError, TypeError, ValueError) as error:
                raise LinkError(f"a {message['kind']!r} message is malformed: {error!r}") from error

    def _describe_end(self) -> str:
        status = self._process.returncode
        if status is None:
            return "it closed its link"
        if status >= 0:
            return f"it ended with status {status}"
        name = signal.Signals(-status).name if -status in list(signal.Signals) else "unknown"
        return f"it was killed by signal {-status} ({name})"

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()  # it has ended, so this returns at once
        self._exited.set()
