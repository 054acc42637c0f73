"""Requests over raw sockets, a connection each: for commands that load a server and want every byte and its time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What came of a request until the server closed the connection.

    Attributes:
        status: 0 where nothing came.
        headers: Names in lower case.
        body: Without the marks between its pieces.
        is_whole: Whether the body came to its end.
        seconds: From the connection's opening to its first bytes and to its end.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What a stream's whole events hold, without the [DONE] that `is_done` tells of."""
        lines = self.body.rpartition(b"\n\n")[0].decode().split("\n\n")
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    @property
    def is_done(self) -> bool:
        """Whether a stream ended as a whole one does."""
        return self.is_whole and self.body.endswith(b"data: [DONE]\n\n")

    @property
    def text(self) -> str:
        """Of all chunks of a stream of one completion."""
        return "".join(one["choices"][0]["text"] for one in self.events if one.get("choices"))

    @property
    def error(self) -> Any:
        """The error that the answer or the stream's last event is; None where it is none."""
        if self.status == 200 and b'"error"' not in self.body:
            return None
        found = self.events[-1] if self.body.startswith(b"data: ") else self.json
        return found.get("error")


def encode_request(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request; a body is sent as JSON."""
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(data)}"]
    lines += ["content-type: application/json"] if data else []
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


async def ask(port: int, request: bytes, leave_after: float | None = None) -> Answer:
    """Sends a request and reads to the end, or leaves after so many seconds with what has come."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received, first = b"", 0.0
    try:
        writer.write(request)
        async with asyncio.timeout(leave_after):
            while part := await reader.read(1 << 16):
                first = first or time.perf_counter() - start
                received += part
    except TimeoutError:
        pass
    finally:
        writer.close()
    return read_answer(received, (first, time.perf_counter() - start))


def read_answer(received: bytes, seconds: tuple[float, float] = (0.0, 0.0)) -> Answer:
    """The answer that these bytes are."""
    head, end, rest = received.partition(b"\r\n\r\n")
    if not end:
        return Answer(seconds=seconds)
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body, is_whole = _join_chunks(rest)
    else:
        body, is_whole = rest, len(rest) == int(headers.get("content-length", -1))
    return Answer(int(status_line.split()[1]), headers, body, is_whole, seconds)


def _join_chunks(data: bytes) -> tuple[bytes, bool]:
    """(the body, whether its last piece has come)."""
    body, start = bytearray(), 0
    while (end := data.find(b"\r\n", start)) >= 0:
        size = int(data[start:end], 16)
        if size == 0:
            return bytes(body), True
        body += data[end + 2 : end + 2 + size]
        start = end + 2 + size + 2
    return bytes(body), False
