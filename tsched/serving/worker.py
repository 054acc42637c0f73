"""A process with one engine, at the other end of a link.

It serves the requests that the front end sends, and ends with the link: nobody is left who waits for anything.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import asdict
from typing import Any, NoReturn

from tsched.serving.engine_client import EngineFailedError, EngineRequest, EngineUnavailableError, RequestRefusedError
from tsched.serving.link import LinkError, Message, encode_message, read_message
from tsched.serving.local_client import LocalClient, LocalStream

_BEAT_S = 0.25
"""Between two snapshots of the engine's counts where no news carry one."""


class Worker:
    """Serves one link.

    Args:
        reader: Of the link.
        writer: Of the link.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._client: LocalClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._deltas: list[tuple[str, Any]] = []  # news since the last message
        self._refusals: list[tuple[str, str, str | None]] = []
        self._is_flushing = False  # a message of the news is due in this turn of the event loop
        self._failure: str | None = None

    async def run(self) -> NoReturn:
        """Serves until the link or the engine ends, and ends the process: nothing of it is worth a longer goodbye."""
        try:
            load = await read_message(self._reader)
            if load is not None and load["kind"] == "load":
                following = asyncio.create_task(self._follow())
                loading = asyncio.create_task(self._load(load))
                await asyncio.wait({following, loading}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done() and loading.result():
                    await following
        finally:
            os._exit(0)

    async def _load(self, load: Message) -> bool:
        """Makes the engine ready and says so; returns whether it is."""
        try:
            options = _read_options(load["options"], load["variants_from"])
            client = LocalClient(load["model"], load["name"], **options)
            await client.start()
        except Exception as error:
            await self._send_last({"kind": "load_failed", "reason": f"{type(error).__name__}: {error}"})
            return False
        self._client = client
        self._send({"kind": "ready", "facts": asdict(client.facts), "stats": asdict(client.stats())})
        self._keep(self._beat())
        return True

    async def _follow(self) -> None:
        """Does what the front end asks, until it closes the link."""
        while (message := await read_message(self._reader)) is not None:
            kind = message["kind"]
            if kind == "submit":
                self._submit(EngineRequest(**message["request"]))
            elif kind == "abort" and self._client is not None:
                self._client.abort(message["id"])
            elif kind == "swap":
                self._keep(self._swap(message["id"], message["choices"]))
            else:
                raise LinkError(f"nobody knows a message {kind!r} here")

    def _submit(self, request: EngineRequest) -> None:
        assert self._client is not None, "requests come after `ready`"
        try:
            stream = self._client.submit(request)
        except RequestRefusedError as refusal:
            self._refuse(request.request_id, refusal)
        except (EngineFailedError, EngineUnavailableError) as error:
            self._fail(str(error))
        else:
            self._keep(self._pass_on(request.request_id, stream))

    async def _pass_on(self, request_id: str, stream: LocalStream) -> None:
        """Hands a request's deltas to the message of their step."""
        try:
            async for delta in stream:
                self._deltas.append((request_id, delta))
                self._flush_soon()
        except RequestRefusedError as refusal:
            self._refuse(request_id, refusal)
        except EngineFailedError as error:
            self._fail(str(error))

    def _refuse(self, request_id: str, refusal: RequestRefusedError) -> None:
        self._refusals.append((request_id, str(refusal), refusal.param))
        self._flush_soon()

    def _fail(self, reason: str) -> None:
        """The engine has failed: says so once, and ends."""
        if self._failure is None:
            self._failure = reason
            self._keep(self._send_last({"kind": "failed", "reason": reason}))

    async def _swap(self, swap_id: int, choices: dict[str, Any]) -> None:
        assert self._client is not None, "swaps come after `ready`"
        try:
            swap = await self._client.swap_kernels(choices)
        except RequestRefusedError as refusal:
            self._send({"kind": "swap_refused", "id": swap_id, "reason": str(refusal), "param": refusal.param})
        except (EngineFailedError, EngineUnavailableError) as error:
            self._fail(str(error))
        else:
            self._send({"kind": "swapped", "id": swap_id, **asdict(swap)})

    async def _beat(self) -> None:
        """Sends the engine's counts now and then: they show whether it moves where nobody gets a token."""
        while True:
            await asyncio.sleep(_BEAT_S)
            self._flush()

    def _flush_soon(self) -> None:
        """Sends the news once all streams that this step woke have had their turn: they are next in the loop's queue,
        and the message after them.
        """
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._failure is not None or self._client is None:
            return
        deltas, self._deltas = self._deltas, []
        refusals, self._refusals = self._refusals, []
        stats = asdict(self._client.stats())
        self._send({"kind": "news", "deltas": deltas, "refusals": refusals, "stats": stats})

    def _send(self, message: Message) -> None:
        if not self._writer.is_closing():
            self._writer.write(encode_message(message))

    async def _send_last(self, message: Message) -> None:
        self._send(message)
        await self._writer.drain()
        self._writer.close()
        await self._writer.wait_closed()
        os._exit(1)

    def _keep(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _read_options(options: dict[str, Any], folders: list[str]) -> dict[str, Any]:
    """The engine's options, with the registry that outside folders join."""
    if not folders:
        return options
    from tkernels import OPS

    ops = OPS
    for folder in folders:
        ops = ops.with_variants_from(folder)
    return {**options, "ops": ops}


async def _serve(link: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=link)
    await Worker(reader, writer).run()


def main(descriptor: int) -> None:
    """Serves the link whose file descriptor this process has inherited."""
    asyncio.run(_serve(socket.socket(fileno=descriptor)))
