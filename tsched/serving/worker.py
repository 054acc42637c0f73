"""A process with one engine, at the other end of a link.

It serves the requests that the front end sends, and ends with the link: nobody is left who waits for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

import tkernels  # before anything that imports Triton: it decides whether this process interprets or compiles
from tkernels.isolation import die_with
from tkernels.ranges import NVTX
from tsched.execution.engine_thread import EngineThread
from tsched.execution.news import News, Ticket
from tsched.execution.phase_times import PhaseTimes
from tsched.execution.served_model import ServedModel
from tsched.serving.engine_client import (
    Delta,
    EngineRequest,
    RequestRefusedError,
    StatsSnapshot,
    TokenScores,
    read_sampling,
)
from tsched.serving.engine_records import (
    describe_error,
    describe_failure,
    describe_model,
    describe_scores,
    make_delta,
    read_stats,
)
from tsched.serving.link import LinkError, LinkWriter, Message, encode_message, read_message

PlainTokens = tuple[str, int, list[int], str, list[TokenScores] | None]
"""(request, sample, new tokens, their text and, where asked for, log-probabilities): of a step nearly all news are
such, and as records they cost five times as much."""

Refusal = tuple[str, str, str | None]
"""(request, why, the field that is wrong)."""

_STATS = [one.name for one in fields(StatsSnapshot)]
_GC_THRESHOLD = 20_000
"""New objects after which the youngest are collected. A step makes a few for each request, which go with its message;
it meets Python's own threshold several times.
"""
_BEAT_S = 0.25
"""Between two snapshots of the engine's counts where no news carry one."""


@dataclass(frozen=True, slots=True)
class _Engine:
    """A loaded model, the times of its engine's phases, and the thread that runs it."""

    served: ServedModel
    times: PhaseTimes
    thread: EngineThread


class Worker:
    """Serves one link.

    Args:
        reader: Of the link.
        writer: Of the link.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: LinkWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._engine: _Engine | None = None  # once it is loaded
        self._tickets: dict[str, Ticket] = {}  # of unfinished requests
        self._swapping = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> NoReturn:
        """Serves until the link or the engine ends, and ends the process: nothing of it is worth a longer goodbye."""
        status = 1
        try:
            load = await read_message(self._reader)
            if load is not None and load["kind"] == "load":
                following = asyncio.create_task(self._follow())
                loading = asyncio.create_task(self._load(load))
                await asyncio.wait({following, loading}, return_when=asyncio.FIRST_COMPLETED)
                if following.done() or loading.result():
                    await following
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)

    async def _load(self, load: Message) -> bool:
        """Makes the engine ready and says so; returns whether it is."""
        loop = asyncio.get_running_loop()
        try:
            served, times = await asyncio.to_thread(
                _load_model, load["model"], load["options"], load["variants_from"], self._tell_recording
            )
        except Exception as error:
            await self._send_last({"kind": "load_failed", "reason": f"{type(error).__name__}: {error}"})
            return False
        facts = describe_model(served, load["name"])
        thread = served.start_thread(
            on_news=self._tell,
            on_end=lambda failure: loop.call_soon_threadsafe(self._end, failure),
            label_logprobs=False,  # the front end does, with the texts of the tokens that it has
        )
        self._engine = _Engine(served, times, thread)
        self._send({"kind": "ready", "facts": asdict(facts), "stats": asdict(read_stats(served, times))})
        self._keep(self._beat())
        return True

    async def _follow(self) -> None:
        """Does what the front end asks, until it closes the link."""
        while (message := await read_message(self._reader)) is not None:
            kind, engine = message["kind"], self._engine
            if engine is None:
                raise LinkError(f"a message {kind!r} came before the engine was ready")
            if kind == "submit":
                self._submit(engine, [EngineRequest(**one) for one in message["requests"]])
            elif kind == "abort":
                ticket = self._tickets.get(message["id"])
                if ticket is not None:
                    engine.thread.abort(ticket)
            elif kind == "swap":
                self._keep(self._swap(engine, message["id"], message["choices"]))
            else:
                raise LinkError(f"nobody knows a message {kind!r} here")

    def _submit(self, engine: _Engine, requests: list[EngineRequest]) -> None:
        tickets: dict[str, Ticket] = {}
        for request in requests:
            try:
                tickets[request.request_id] = engine.served.make_ticket(
                    request.request_id,
                    request.prompt_token_ids,
                    read_sampling(request.sampling),
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                )
            except (RequestRefusedError, ValueError) as error:
                refusal = (request.request_id, str(error), getattr(error, "param", None))
                self._send_news(engine, refusals=[refusal])
        self._tickets |= tickets
        with contextlib.suppress(RuntimeError):  # the thread has ended, which is told anyway
            engine.thread.submit(*tickets.values())

    def _tell_recording(self, done: int, total: int) -> None:
        """Sends how far the recording of graphs is, on the thread that loads."""
        self._send({"kind": "recording", "done": done, "total": total})

    def _tell(self, news: list[News]) -> None:
        """Sends the news of one step, on the engine's thread."""
        engine = self._engine
        if engine is None or engine.thread.failure is not None:  # the end is told of all requests at once
            return
        tokens: list[PlainTokens] = []
        deltas: list[tuple[str, Delta]] = []
        refusals: list[Refusal] = []
        for one in news:
            ticket = one.ticket
            request_id = str(ticket.prepared.request_id)
            if one.finish_reason is None and one.prompt_scores is None:
                scores = None if one.scores is None else describe_scores(one)
                tokens.append((request_id, one.index, one.token_ids, one.text, scores))
                continue
            if one.is_last:
                self._tickets.pop(request_id, None)
            if ticket.refusal is None:
                deltas.append((request_id, make_delta(one)))
            elif one.is_last:
                refusals.append((request_id, ticket.refusal, "prompt"))
        self._send_news(engine, tokens, deltas, refusals)

    def _send_news(
        self,
        engine: _Engine,
        tokens: Sequence[PlainTokens] = (),
        deltas: Sequence[tuple[str, Delta]] = (),
        refusals: Sequence[Refusal] = (),
    ) -> None:
        now = read_stats(engine.served, engine.times)
        stats = {name: getattr(now, name) for name in _STATS}  # asdict copies what is in it
        try:
            self._send({"kind": "news", "tokens": tokens, "deltas": deltas, "refusals": refusals, "stats": stats})
        except LinkError as error:  # log-probabilities of long prompts, or of whole vocabularies
            if tokens and deltas:
                self._send_news(engine, tokens)
                self._send_news(engine, deltas=deltas, refusals=refusals)
            elif len(tokens) > 1 or len(deltas) > 1:
                half = (len(tokens) + len(deltas)) // 2
                self._send_news(engine, tokens[:half], deltas[:half])
                self._send_news(engine, tokens[half:], deltas[half:], refusals)
            else:
                self._refuse_news(engine, str((tokens or deltas)[0][0]), error, refusals)

    def _refuse_news(self, engine: _Engine, request_id: str, error: LinkError, refusals: Sequence[Refusal]) -> None:
        """Ends a request whose news no message holds."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            engine.thread.abort(ticket)
        self._send_news(engine, refusals=[*refusals, (request_id, f"its answer is too long: {error}", None)])

    def _end(self, failure: BaseException | None) -> None:
        """The engine has ended, which it does of itself only by failing."""
        self._keep(self._send_last({"kind": "failed", "reason": describe_failure(failure)}))

    async def _swap(self, engine: _Engine, swap_id: int, choices: dict[str, Any]) -> None:
        async with self._swapping:  # the next one goes out from what this one leaves
            try:
                swap = await asyncio.to_thread(engine.served.plan_swap, choices)
                first_step = await asyncio.wrap_future(engine.thread.call(swap))
            except Exception as error:  # memory for weights in another layout, besides what is refused
                is_refusal = isinstance(error, tkernels.SelectionError)
                reason = str(error) if is_refusal else describe_error(error)
                self._send({"kind": "swap_refused", "id": swap_id, "reason": reason, "param": "kernels"})
            else:
                served = engine.served
                now = {"first_step": first_step, "arm": served.arm, "kernels": served.kernel_choices}
                self._send({"kind": "swapped", "id": swap_id, **now})

    async def _beat(self) -> None:
        """Sends the engine's counts now and then: they show whether it moves where nobody gets a token."""
        while self._engine is not None:
            await asyncio.sleep(_BEAT_S)
            self._send_news(self._engine)

    def _send(self, message: Message) -> None:
        self._writer.write(encode_message(message))

    async def _send_last(self, message: Message) -> None:
        self._send(message)
        await self._writer.flush()
        os._exit(1)

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _load_model(
    model: str, options: dict[str, Any], folders: list[str], tell: Callable[[int, int], object]
) -> tuple[ServedModel, PhaseTimes]:
    """The model, warm, with the kernel variants of outside folders, and the times of its engine's phases.

    Args:
        tell: Called with how many sets of graphs are recorded and how many will be.
    """
    times = PhaseTimes(NVTX)
    ops = tkernels.OPS
    for folder in folders:
        ops = ops.with_variants_from(folder)
    served = ServedModel(model, **options, ops=ops, ranges=times)
    served.warm_up(tell)
    # What is here now stays: a full collection would go through all of it, every few dozen steps, while they wait.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    return served, times


async def _serve(link: socket.socket) -> None:
    writer = LinkWriter(link, asyncio.get_running_loop())
    reader, _kept = await asyncio.open_connection(sock=link)  # asyncio closes a link whose writer is gone
    await Worker(reader, writer).run()


def main(descriptor: int) -> None:
    """Serves the link whose file descriptor this process has inherited."""
    # The link's end is noticed by a process that runs; one that hangs or is stopped would live on, and hold its memory.
    die_with(os.getppid(), signal.SIGKILL)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))
