"""An engine in a process of its own, started, watched and started again: `SupervisedClient` behind `EngineClient`.

Loads no torch. A worker that dies, hangs or fails ends the requests that it had begun to answer, with the reason; those
that it had sent nothing for wait for the next worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tsched.options import read_options
from tsched.requests.errors import ArgumentError
from tsched.serving.engine_client import (
    Delta,
    EngineFailedError,
    EngineRequest,
    EngineUnavailableError,
    KernelSwap,
    ModelFacts,
    RequestRefusedError,
    SampleDelta,
    State,
    StatsSnapshot,
    default_name,
    read_sampling,
)
from tsched.serving.limits import ServerLimits
from tsched.serving.link import LinkError, Message, delta_of, encode_message, scores_of
from tsched.serving.worker_lives import (
    DEATHS_WINDOW_S,
    MOST_DEATHS,
    add_counts,
    forget_counts,
    longest_load,
    restart_delay,
)
from tsched.serving.worker_process import StartedWorker, WorkerProcess, start_process
from tsched.serving.worker_stream import WorkerStream

LOG = logging.getLogger("tsched.serving")
_RECORDING_S = 2.0
"""Between two lines of the log on the recording of graphs, which takes a large model tens of seconds."""
_MOST_LIVES = 2
"""Workers that a request, or swapped kernels, are given to: what kills two of them may be these."""


@dataclass(eq=False, slots=True)
class _Served:
    """A request that has not ended.

    Attributes:
        request: As submitted.
        stream: Its consumer's.
        num_lives: Workers that had it.
        has_sent: Whether its consumer was given anything.
        starts_over: Whether that is void, and the next worker has sent nothing yet.
        is_aborted: Whether its worker was told to end it: no other one gets it.
    """

    request: EngineRequest
    stream: WorkerStream
    num_lives: int = 0
    has_sent: bool = False
    starts_over: bool = False
    is_aborted: bool = False


class SupervisedClient:
    """Serves one model in a worker process.

    Args:
        model: As of `AsyncLLM`.
        name: What clients call it; the name of its directory, preset or hub id by default.
        stall_timeout: Seconds without a step, while a request or a swap is unfinished, after which a worker is killed.
        variants_from: Folders of kernel variants that join the registry.
        options: As of `AsyncLLM`, such that JSON holds them. TypeError or OptionError says at once where one is wrong.
    """

    def __init__(
        self,
        model: str | Path,
        name: str | None = None,
        *,
        stall_timeout: float = ServerLimits.stall_timeout,
        variants_from: Sequence[str | Path] = (),
        **options: Any,
    ) -> None:
        read_options(options)
        self._load: Message = {
            "kind": "load",
            "model": str(model),
            "name": name or default_name(model),
            "options": options,
            "variants_from": [str(folder) for folder in variants_from],
        }
        encode_message(self._load)
        self._first_kernels = options.get("kernels")
        self._stall_timeout = stall_timeout
        self._state: State = "loading"
        self._failure: str | None = None
        self._facts: ModelFacts | None = None
        self._started: StartedWorker | None = None  # before the event loop runs
        self._worker: WorkerProcess | None = None
        self._served: dict[str, _Served] = {}  # unfinished requests in the order of arrival
        self._swaps: dict[int, asyncio.Future[KernelSwap]] = {}
        self._num_swaps = 0
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS + 1)
        self._num_restarts = 0
        self._num_failed_starts = 0  # since a worker was ready
        self._restart_at = 0.0
        self._before: StatsSnapshot | None = None  # sums of the workers before this one
        self._stats: StatsSnapshot | None = None  # of this worker
        self._moved_at = 0.0  # when this worker last took a step, or got its first request or swap
        self._began_load = 0.0  # when this worker was started
        self._said_recording = 0.0  # when
        self._first_load = 0.0  # seconds that the first one's loading took
        self._listeners: list[Callable[[StatsSnapshot], None]] = []
        self._loaded: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> State:
        return self._state

    @property
    def facts(self) -> ModelFacts:
        if self._facts is None:
            raise EngineUnavailableError("the model is being loaded", retry_after=2.0)
        return self._facts

    @property
    def worker_pid(self) -> int | None:
        """Of the process that serves; None between two."""
        return None if self._worker is None else self._worker.pid

    def start_early(self) -> None:
        """Starts the worker's process where no event loop runs yet: it loads torch while the caller gets ready."""
        self._started = start_process()

    async def start(self) -> None:
        """Starts the worker and returns when it has loaded the model.

        Raises:
            EngineFailedError: It could not; the message is what the loading raised, or how the worker ended.
        """
        self._loaded = asyncio.get_running_loop().create_future()
        await self._start_worker()
        await self._loaded
        self._first_load = time.monotonic() - self._began_load
        self._keep(self._watch_progress())

    def check_open(self) -> None:
        if self._state == "failed":
            raise EngineFailedError(str(self._failure))
        if self._state != "ready":
            raise EngineUnavailableError(*self._why_unavailable())

    def submit(self, *requests: EngineRequest) -> list[WorkerStream]:
        if self._state != "restarting":
            self.check_open()
        for request in requests:
            read_sampling(request.sampling)
            if request.request_id in self._served:
                raise ArgumentError(f"a request {request.request_id!r} is not finished yet")
        served = [_Served(request, WorkerStream(partial(self.abort, request.request_id))) for request in requests]
        if not self._served and not self._swaps:
            self._moved_at = time.monotonic()
        try:
            if self._state == "ready" and self._worker is not None:
                self._give(served, self._worker)
            else:  # the next worker gets them
                encode_message(_submission(served))
        except LinkError as error:
            raise RequestRefusedError(str(error), "prompt") from error
        self._served |= {one.request.request_id: one for one in served}
        return [one.stream for one in served]

    def abort(self, request_id: str) -> None:
        served = self._served.get(request_id)
        if served is None:
            return
        if self._worker is None or self._state == "restarting":
            self._end_aborted(served)
        else:
            served.is_aborted = True
            self._worker.send({"kind": "abort", "id": request_id})

    def _end_aborted(self, served: _Served) -> None:
        """Ends a request that no worker has."""
        count = read_sampling(served.request.sampling).n
        del self._served[served.request.request_id]
        served.stream.put(Delta([SampleDelta(i, [], "", None, "abort") for i in range(count)], True))

    def stats(self) -> StatsSnapshot:
        if self._stats is None:
            raise EngineUnavailableError("the model is being loaded", retry_after=2.0)
        return replace(add_counts(self._before, self._stats), num_restarts=self._num_restarts)

    def listen(self, on_stats: Callable[[StatsSnapshot], None]) -> None:
        self._listeners.append(on_stats)

    async def swap_kernels(self, choices: Mapping[str, Any]) -> KernelSwap:
        self.check_open()
        assert self._worker is not None, "it is ready"
        self._num_swaps += 1
        swap_id, answer = self._num_swaps, asyncio.get_running_loop().create_future()
        try:
            self._worker.send({"kind": "swap", "id": swap_id, "choices": dict(choices)})
        except LinkError as error:
            raise RequestRefusedError(str(error), "kernels") from error
        if not self._served and not self._swaps:
            self._moved_at = time.monotonic()
        self._swaps[swap_id] = answer
        try:
            return await answer
        finally:
            self._swaps.pop(swap_id, None)

    async def close(self) -> None:
        """Aborts what is unfinished and ends the worker, in any state."""
        if self._state != "failed":
            self._state = "draining"
        for task in self._tasks:
            task.cancel()
        worker = self._worker
        if worker is not None:
            worker.kill("the server is stopping")
            await worker.wait()
        self._fail_all("the server is stopping")

    def _why_unavailable(self) -> tuple[str, float]:
        """(why no request is taken now, seconds after which to ask again)."""
        if self._state == "draining":
            return "the server is stopping and takes no more requests", 5.0
        if self._state == "restarting":
            left = self._restart_at - time.monotonic()
            return "the engine is being started again", max(1.0, left)
        return "the model is being loaded", 2.0

    # From the worker.

    def _receive(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "news":
            self._take_news(message)
        elif kind == "ready":
            self._begin(message)
        elif kind == "recording":
            self._note_recording(message["done"], message["total"])
        elif kind in ("failed", "load_failed"):
            self._failure = message["reason"]
            if kind == "failed":
                self._fail_all(message["reason"])
        elif kind == "swapped":
            self._take_swap(message)
        elif kind == "swap_refused":
            answer = self._swaps.get(message["id"])
            if answer is not None and not answer.done():
                answer.set_exception(RequestRefusedError(message["reason"], message["param"]))
        else:
            raise LinkError(f"nobody knows a message {kind!r} here")

    def _note_recording(self, done: int, total: int) -> None:
        """Says how far a worker's recording of graphs is, now and then."""
        now = time.monotonic()
        if done in (0, total) or now - self._said_recording > _RECORDING_S:
            self._said_recording = now
            LOG.info("CUDA graphs of steps: %d of %d recorded", done, total)

    def _take_swap(self, message: Message) -> None:
        """Notes the kernels that serve now; the next worker begins with them."""
        if self._stats is not None:
            self._stats = replace(self._stats, arm=message["arm"])
        self._load["options"]["kernels"] = message["kernels"]
        LOG.info("the kernels are swapped, from step %d on: %s", message["first_step"], json.dumps(message["kernels"]))
        answer = self._swaps.get(message["id"])
        if answer is not None and not answer.done():
            answer.set_result(KernelSwap(message["first_step"], message["arm"]))

    def _begin(self, message: Message) -> None:
        facts = ModelFacts(**message["facts"] | {"eos_token_ids": tuple(message["facts"]["eos_token_ids"])})
        self._facts = facts if self._facts is None else replace(facts, created=self._facts.created)
        self._stats, self._moved_at = StatsSnapshot(**message["stats"]), time.monotonic()
        self._num_failed_starts = 0
        if self._state == "restarting":
            LOG.info("the engine serves again")
        if self._state in ("loading", "restarting"):
            self._state = "ready"
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
        assert self._worker is not None, "it has just said that it is ready"
        for served in self._served.values():
            self._give([served], self._worker)

    def _take_news(self, message: Message) -> None:
        stats = StatsSnapshot(**message["stats"])
        is_newer = self._stats is None or stats.num_steps > self._stats.num_steps
        if is_newer or message["deltas"] or message["refusals"]:
            self._moved_at = time.monotonic()
        self._stats = stats
        for listener in self._listeners if is_newer else ():
            listener(self.stats())
        for request_id, sample, token_ids, text, scores in message["tokens"]:
            self._hand_on(request_id, Delta([SampleDelta(sample, token_ids, text, scores_of(scores))], False))
        for request_id, written in message["deltas"]:
            self._hand_on(request_id, delta_of(written))
        for request_id, reason, param in message["refusals"]:
            served = self._served.pop(request_id, None)
            if served is not None:
                served.stream.fail(RequestRefusedError(reason, param))

    def _hand_on(self, request_id: str, delta: Delta) -> None:
        served = self._served.get(request_id)
        if served is not None:
            if served.starts_over:
                served.starts_over, delta = False, delta._replace(starts_over=True)
            served.has_sent = True
            if delta.is_last:
                del self._served[request_id]
            served.stream.put(delta)

    # Lives and deaths.

    async def _start_worker(self) -> None:
        self._failure, self._began_load = None, time.monotonic()
        started, self._started = self._started or start_process(), None
        self._worker = WorkerProcess(started, self._receive, self._on_death)
        await self._worker.open()
        self._worker.send(self._load)

    def _on_death(self, reason: str) -> None:
        is_failed_start = self._state == "restarting" and self._worker is not None
        self._worker = None
        for answer in self._swaps.values():
            if not answer.done():
                answer.set_exception(EngineUnavailableError(f"the engine's process is no more: {reason}"))
        reason = self._failure or f"the engine's process is no more: {reason}"
        if self._loaded is not None and not self._loaded.done():
            self._state, self._failure = "failed", reason
            self._loaded.set_exception(EngineFailedError(reason))
        if self._state in ("failed", "draining"):
            self._fail_all(reason)
            return
        if self._stats is not None:
            idle = replace(self._stats, num_running=0, num_waiting=0, num_used_blocks=0)
            self._before, self._stats = add_counts(self._before, idle), forget_counts(idle)
        if is_failed_start:
            self._note_failed_start()
        self._part_with_worker(reason)
        now = time.monotonic()
        self._deaths.append(now)
        delay = restart_delay(self._deaths, now)
        if delay is None:
            self._state = "failed"
            self._failure = f"the engine failed {len(self._deaths)} times in {DEATHS_WINDOW_S:.0f} s, at last: {reason}"
            LOG.error("%s", self._failure)
            self._fail_all(self._failure)
            return
        LOG.error("%s; it is started again in %g s, %d requests wait for it", reason, delay, len(self._served))
        self._state, self._restart_at = "restarting", now + delay
        self._keep(self._restart(delay))

    def _part_with_worker(self, reason: str) -> None:
        """Ends the requests that no other worker may have."""
        for served in [*self._served.values()]:
            served.starts_over = served.has_sent
            if served.is_aborted:
                self._end_aborted(served)
            elif (served.has_sent and not served.stream.may_start_over) or served.num_lives >= _MOST_LIVES:
                del self._served[served.request.request_id]
                served.stream.fail(EngineFailedError(reason))

    def _note_failed_start(self) -> None:
        """A worker died before it was ready. After two with swapped kernels, the next has those of the start."""
        self._num_failed_starts += 1
        if self._num_failed_starts >= _MOST_LIVES and self._load["options"].get("kernels") != self._first_kernels:
            LOG.error("no worker starts with the swapped kernels: the next has those of the first start")
            self._load["options"]["kernels"] = self._first_kernels

    async def _restart(self, delay: float) -> None:
        await asyncio.sleep(delay)
        self._num_restarts += 1
        try:
            await self._start_worker()
        except OSError as error:  # no process or no file is left
            self._on_death(f"it could not be started: {error}")

    async def _watch_progress(self) -> None:
        """Kills a worker that takes no step with something unfinished, and a later one that does not get ready."""
        while True:
            await asyncio.sleep(min(1.0, self._stall_timeout / 4))
            if self._worker is None:
                continue
            now = time.monotonic()
            still, loading = now - self._moved_at, now - self._began_load
            if self._state == "restarting":
                if loading > longest_load(self._first_load, self._stall_timeout):
                    self._worker.kill(f"it did not load the model in {loading:.1f} s")
            elif (self._served or self._swaps) and still > self._stall_timeout:
                unfinished = f"{len(self._served)} unfinished requests" if self._served else "kernels to swap"
                self._worker.kill(f"it took no step for {still:.1f} s with {unfinished}")

    def _give(self, served: Sequence[_Served], worker: WorkerProcess) -> None:
        worker.send(_submission(served))
        for one in served:
            one.num_lives += 1

    def _fail_all(self, reason: str) -> None:
        ended, self._served = self._served, {}
        for served in ended.values():
            served.stream.fail(EngineFailedError(reason))

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _submission(served: Sequence[_Served]) -> Message:
    """The message that gives requests to a worker."""
    names = [one.name for one in fields(EngineRequest)]  # asdict copies tokens
    return {"kind": "submit", "requests": [{name: getattr(one.request, name) for name in names} for one in served]}
