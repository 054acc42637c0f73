"""Tasks in the test's own process: for tests of what a task finds, which need no process of their own for it."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from experiments.stages.task import Task
from experiments.sweep.tasks import Ended, OnDoing, Setup
from experiments.sweep.work import carry_out, plans_of


class InProcess:
    """An executor without processes: what would end one ends the test. tasks: the keys, in the order they ran."""

    name = "in process"

    def __init__(self) -> None:
        self.tasks: list[str] = []

    @contextmanager
    def start(self, setup: Setup) -> Iterator[None]:
        self._setup = setup
        yield

    def end(self) -> None:
        pass

    def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        planned = plans_of(self._setup) if tasks else None
        for task in tasks:
            assert planned is not None
            self.tasks.append(task.key)
            ended = Ended(task)

            def send(message: object, ended: Ended = ended) -> None:
                ended.hear(json.loads(json.dumps(message)))

            carry_out(Task(**json.loads(json.dumps(asdict(task)))), planned, self._setup, send)
            yield ended
