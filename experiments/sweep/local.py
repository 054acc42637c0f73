"""Tasks on this machine, one after the other: each in a child of its replicate's server.

Needs no torch: a server imports it at the same time as the process that begins it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from experiments.document import ExperimentError
from experiments.stages.task import Task
from experiments.sweep.tasks import Ended, OnDoing, Setup
from tsched.torch_free import load_from_file

if TYPE_CHECKING:
    from tkernels import isolation
else:
    isolation = load_from_file("isolation")

_MOST_SERVERS = 5
"""At once. One holds about 0.4 GB while it waits; starting one takes seconds, in which nothing can be measured."""


def begin_server(serves: bool) -> isolation.Server:
    """A server that imports what a run's tasks want: with a model, also most of what a small engine's start takes."""
    tokenizer = ("transformers.models.auto.tokenization_auto",) if serves else ()
    return isolation.Server(imports=("experiments.sweep.work", *tokenizer))


def load_tasks(server: isolation.Server, setup: Setup) -> None:
    """Says which run's tasks they will be."""
    environment = {"TRITON_INTERPRET": "1" if setup.mode == "interpret" else "0"}
    server.load("experiments.sweep.work:prepare_tasks", asdict(setup), environment)


def run_task(server: isolation.Server, task: Task, doing: OnDoing) -> Ended:
    """Runs one task to its end."""
    wait_for(server)
    ended = Ended(task)

    def hear(message: Any) -> None:
        ended.hear(message)
        if "doing" in message:
            doing(task, message["doing"])

    try:
        ending = server.run(asdict(task), hear, task.timeout)
    except isolation.ServerError as error:
        ended.death = f"the server of its replicate {error}"
        return ended
    ended.seconds, ended.death, ended.printed = ending.seconds, ending.death or ended.death, ending.printed
    return ended


def wait_for(server: isolation.Server) -> None:
    """Waits until a server can take a task; ExperimentError where it never will, and no other would."""
    try:
        server.wait()
    except isolation.ServerError as error:
        raise ExperimentError([f"the process that tasks are forked from {error}"]) from None


class Local:
    """The executor of this machine. `begin` may come before a run is known."""

    name = "local"

    def __init__(self) -> None:
        self._servers: dict[int, isolation.Server] = {}  # by replicate
        self._setup: Setup | None = None

    def begin(self, serves: bool) -> None:
        """Starts the first replicate's server, for the run that `start` will tell of.

        serves: whether the run has tasks with a model.
        """
        self._servers[0] = begin_server(serves)

    def end(self) -> None:
        for server in self._servers.values():
            server.end()
        self._servers.clear()

    @contextmanager
    def start(self, setup: Setup) -> Iterator[None]:
        """Starts the first replicates' servers, which import while variants are checked."""
        self._setup = setup
        try:
            for replicate in range(min(setup.replicates, _MOST_SERVERS)):
                self._start(replicate)
            yield
        finally:
            self.end()

    def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        for task in tasks:
            left: Task | None = task
            while left is not None:
                ended = self._run(left, doing)
                yield ended
                left = ended.rest

    def _run(self, task: Task, doing: OnDoing) -> Ended:
        server = self._server(task.replicate)
        if task.is_timed:
            for other in self._servers.values():  # what imports would be measured too
                wait_for(other)
        return run_task(server, task, doing)

    def _server(self, replicate: int) -> isolation.Server:
        """The replicate's server, started where it is not there or has died."""
        server = self._servers.get(replicate)
        if server is not None and not server.is_dead:
            return server
        if server is not None or len(self._servers) == _MOST_SERVERS:
            self._servers.pop(replicate if server is not None else next(iter(self._servers))).end()
        return self._start(replicate)

    def _start(self, replicate: int) -> isolation.Server:
        assert self._setup is not None
        server = self._servers.get(replicate) or begin_server(self._setup.serves)
        self._servers[replicate] = server
        load_tasks(server, self._setup)
        return server
