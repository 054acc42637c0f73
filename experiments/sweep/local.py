"""Tasks on this machine, one after the other: each in a child of its replicate's server.

`Local.begin` is for a process that has not imported torch yet: the server imports it at the same time.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from experiments.document import ExperimentError
from experiments.stages.task import Task
from experiments.sweep.tasks import Ended, Setup, Tell
from tsched.torch_free import load_from_file

if TYPE_CHECKING:
    from tkernels.isolation import Server

_MOST_SERVERS = 5
"""At once. One holds about 0.4 GB while it waits; starting one takes seconds, in which nothing can be measured."""


def start_server(setup: Setup, begun: "subprocess.Popen[bytes] | None" = None) -> "Server":
    """A server for a run's tasks; of a process that was begun, where there is one."""
    from tkernels.isolation import Server

    environment = {"TRITON_INTERPRET": "1" if setup.mode == "interpret" else "0"}
    server = Server(environment, _imports(setup.serves), begun)
    server.load("experiments.sweep.work:prepare_tasks", setup.as_json(), environment)
    return server


def _imports(serves: bool) -> tuple[str, ...]:
    """What a run's tasks want: with a model, also most of what a small engine's start would take."""
    return ("experiments.sweep.work", *(["transformers.models.auto.tokenization_auto"] if serves else []))


def run_task(server: "Server", task: Task, doing: Tell, printed: Tell) -> Ended:
    """Runs one task to its end."""
    from tkernels.isolation import ServerError

    wait_for(server)
    ended = Ended(task)

    def hear(message: Any) -> None:
        ((kind, value),) = message.items()
        ended.hear(kind, value)
        if kind == "doing":
            doing(task, value)

    try:
        ending = server.run(task.as_json(), hear, task.timeout)
    except ServerError as error:
        ended.death = f"the server of its replicate {error}"
        return ended
    if ending.printed:
        printed(task, ending.printed)
    ended.seconds, ended.death = ending.seconds, ending.death or ended.death
    return ended


def wait_for(server: "Server") -> None:
    """Waits until a server can take a task; ExperimentError where it never will, and no other would."""
    from tkernels.isolation import ServerError

    try:
        server.wait()
    except ServerError as error:
        raise ExperimentError([f"the process that tasks are forked from {error}"]) from None


class Local:
    """The executor of this machine. `begin` may come before a run is known."""

    name = "local"

    def __init__(self) -> None:
        self._servers: dict[int, Server] = {}
        self._begun: list[subprocess.Popen[bytes]] = []
        self._setup: Setup | None = None

    def begin(self, serves: bool) -> None:
        """Starts a server's process for the run that `start` will tell of; without one it ends with this process.

        serves: whether the run has tasks with a model.
        """
        self._begun.append(load_from_file("isolation").start_server(imports=_imports(serves)))

    def end(self) -> None:
        for process in self._begun:
            process.kill()  # it has no child
            process.communicate()
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
                wait_for(other)
        return run_task(server, task, doing, printed)

    def _server(self, replicate: int) -> "Server":
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

    def _start(self, replicate: int) -> "Server":
        assert self._setup is not None
        server = start_server(self._setup, self._begun.pop() if self._begun else None)
        self._servers[replicate] = server
        return server
