"""Tasks on this machine, one after the other: each in a child of its replicate's server. Needs no torch itself."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from experiments.document import ExperimentError
from experiments.sweep.server import signal_reason
from experiments.sweep.tasks import Ended, Setup, Task, Tell

_MOST_SERVERS = 5
"""At once. One holds about 0.4 GB while it waits; starting one takes seconds, in which nothing can be measured."""


class Server:
    """A process of experiments.sweep.server. It ends when this object's pipe to it closes, or the thread that made it
    ends.
    """

    def __init__(self) -> None:
        # A session of its own: Ctrl-C is for the one that starts it, who ends it in good order.
        self._process = subprocess.Popen(
            (sys.executable, "-m", "experiments.sweep.server", str(os.getpid())),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.is_ready = False

    def set_up(self, setup: Setup) -> None:
        """Which run it is for; it then takes tasks."""
        self._send(setup.as_json())

    @property
    def _answers(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _send(self, data: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead, which its answers tell
            self._process.stdin.write(json.dumps(data).encode() + b"\n")
            self._process.stdin.flush()

    def wait(self) -> None:
        """Until it can take a task; ExperimentError where it never will, and no other would."""
        if not self.is_ready:
            if not self._answers.readline():
                status = self._process.wait()
                how = signal_reason(-status) if status < 0 else f"exit status {status}"
                raise ExperimentError([f"the process that tasks are forked from did not start: {how}"])
            self.is_ready = True

    def run(self, task: Task, doing: Tell, printed: Tell) -> Ended:
        """One task, to its end."""
        self.wait()
        ended = Ended(task)
        self._send(task.as_json())
        for line in self._answers:
            ((kind, value),) = json.loads(line).items()
            if kind == "over":
                ended.seconds, ended.death = value["seconds"], value["death"] or ended.death
                return ended
            if kind == "printed":
                printed(task, value)
                continue
            ended.hear(kind, value)
            if kind == "doing":
                doing(task, value)
        status = self._process.wait()
        how = signal_reason(-status) if status < 0 else f"exit status {status}"
        ended.death = f"the server of its replicate ended: {how}"
        return ended

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def end(self, patience: float = 1.0) -> None:
        """Ends it and the child that it may have, after so many seconds by force."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:  # it still imports; a child of it dies with it
            self._process.kill()
            self._process.wait()
        self._answers.close()


class Local:
    """The executor of this machine. `begin` may come before a run is known."""

    name = "local"

    def __init__(self) -> None:
        self._servers: dict[int, Server] = {}
        self._begun: list[Server] = []
        self._setup: Setup | None = None

    def begin(self) -> None:
        """Starts a server for the run that will be told by `start`, so that both processes import at the same time. It
        ends with this process where there is none.
        """
        self._begun.append(Server())

    def end(self) -> None:
        for server in self._begun:
            server.end(patience=0.0)  # it has no child
        self._begun.clear()

    @contextmanager
    def start(self, setup: Setup) -> Iterator[None]:
        """Starts the first replicates' servers, which import while variants are checked."""
        self._setup = setup
        try:
            for replicate in range(min(setup.replicates, _MOST_SERVERS)):
                self._start(replicate)
            yield
        finally:
            for server in self._servers.values():
                server.end()
            self._servers.clear()

    def run(self, tasks: Sequence[Task], doing: Tell, printed: Tell) -> Iterator[Ended]:
        for task in tasks:
            left: Task | None = task
            while left is not None:
                ended = self._run(left, doing, printed)
                yield ended
                left = ended.rest

    def _run(self, task: Task, doing: Tell, printed: Tell) -> Ended:
        server = self._server(task.replicate)
        if task.is_timed:
            for other in self._servers.values():  # what imports would be measured too
                other.wait()
        return server.run(task, doing, printed)

    def _server(self, replicate: int) -> Server:
        """The replicate's server, started where it is not there or has died."""
        server = self._servers.get(replicate)
        if server is not None and server.is_dead:
            self._servers.pop(replicate).end()
            server = None
        if server is None:
            if len(self._servers) == _MOST_SERVERS:
                self._servers.pop(next(iter(self._servers))).end()
            server = self._start(replicate)
        return server

    def _start(self, replicate: int) -> Server:
        assert self._setup is not None
        server = self._servers[replicate] = self._begun.pop() if self._begun else Server()
        server.set_up(self._setup)
        return server
