"""Tasks over a Ray cluster: each where Ray finds a GPU for it, or a core where there is no CUDA.

A Ray worker does not do a task itself, but starts for it the server process that a local run forks its tasks from: a
crash, a timeout or memory that runs out is told in the same words, and what Ray has in its workers (threads, gRPC) is
not what is measured. Nothing of a task is left in a worker, which may take the next: told to leave after each
(max_calls=1), 5 of some 60 workers of Ray 2.60 aborted while they left. The rows go back to the driver, which alone
writes the run folder.

Every node needs this code, the model's directory and outside variants under the same paths. Compare speeds of arms that
ran on nodes of one kind, and had no neighbours: a core is not alone on its machine.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from experiments.document import ExperimentError
from experiments.stages.task import Task
from experiments.sweep.local import begin_server, load_tasks, run_task
from experiments.sweep.tasks import Ended, OnDoing, Setup

if TYPE_CHECKING:
    from types import ModuleType


def carry_out(setup: Setup, task: Task) -> Ended:
    """In a Ray worker: the task in a process of its own."""
    with begin_server(setup.serves) as server:
        load_tasks(server, setup)
        return run_task(server, task, lambda task, text: None)


class OnRay:
    """The executor of a Ray cluster: the one that RAY_ADDRESS or `ray start` on this machine says, else one that is
    started here for the length of the run.
    """

    name = "ray"

    def __init__(self) -> None:
        """Raises ExperimentError where Ray is not installed."""
        self._ray: ModuleType = _import_ray()
        self._setup: Setup | None = None

    @contextmanager
    def start(self, setup: Setup) -> Iterator[None]:
        self._setup = setup
        started_here = not self._ray.is_initialized()
        if started_here:
            os.environ.setdefault("RAY_worker_niceness", "0")  # its workers give way to all others else
            # Its dashboard and its log lines are for those who run clusters.
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            yield
        finally:
            if started_here:
                self._ray.shutdown()

    def end(self) -> None:
        pass

    def run(self, tasks: Sequence[Task], doing: OnDoing) -> Iterator[Ended]:
        """All at once, begun in the order given; Ray waits with those that there is no room for. What is left of a task
        that died comes after them.
        """
        assert self._setup is not None
        share = {"num_gpus": 1, "num_cpus": 0} if self._setup.on_cuda else {"num_cpus": 1}
        self._check_room(share)
        remote = self._ray.remote(max_retries=0, **share)(carry_out)
        pending = {remote.remote(self._setup, task): task for task in tasks}
        try:
            while pending:
                doing(next(iter(pending.values())), f"and {len(pending) - 1} more" if len(pending) > 1 else "")
                (done,), _ = self._ray.wait(list(pending), num_returns=1)
                task = pending.pop(done)
                try:
                    ended = self._ray.get(done)
                except self._ray.exceptions.RayError as error:
                    # The worker itself is gone: its node died, or Ray ended it because the node had no memory left.
                    reason = " ".join(str(error).split())[:300]
                    ended = Ended(task, death=f"its Ray worker: {type(error).__name__}: {reason}")
                if ended.rest is not None:
                    pending[remote.remote(self._setup, ended.rest)] = ended.rest
                yield ended
        finally:
            for reference in pending:
                self._ray.cancel(reference, force=True)

    def _check_room(self, share: Mapping[str, int]) -> None:
        """Raises ExperimentError where no node has a GPU: a task would wait for ever."""
        if share.get("num_gpus") and not self._ray.cluster_resources().get("GPU"):
            raise ExperimentError(["--executor ray: device is cuda, and no node of the cluster has a GPU"])


def _import_ray() -> "ModuleType":
    try:
        import ray
    except ImportError:
        message = "--executor ray needs Ray, which is not installed: pip install 'tkernels[ray]'"
        raise ExperimentError([message]) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # an experiment tells nobody that it ran
    module: ModuleType = ray
    return module
