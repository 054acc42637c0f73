"""A server of the small random model, on a port of its own, in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from tsched.serving.app import create_api_server
from tsched.serving.http import make_server
from tsched.serving.listening import open_socket

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "block_size": 4, "kv_cache_bytes": 1 << 20}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{{ '!' if loud }}{% endif %}"


class RunningServer:
    """An app that is served; `base` is its address."""

    def __init__(self, app: FastAPI) -> None:
        self.app, self.front = app, app.state.front_end
        self._listening = open_socket("127.0.0.1", 0)
        self.port = self._listening.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.server = make_server(app)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self.server.serve(sockets=[self._listening])

        asyncio.run(serve())

    def wait_until_ready(self) -> RunningServer:
        while self.get("/ready").status != 200:
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """As two signals: what is in work ends at once."""
        assert self.loop is not None
        with contextlib.suppress(RuntimeError):  # it has stopped, and its loop is closed
            for _ in range(2):
                self.loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        return self.ask("POST", path, body, headers)

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request on a connection of its own; a body that is no bytes is sent as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            kind = {"content-type": "application/json"} if data is not None else {}
            connection.request(method, path, data, kind | (headers or {}))
            return Answer(connection.getresponse())
        finally:
            connection.close()


class Answer:
    """A response, read to its end."""

    def __init__(self, response: HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """What a stream's events hold; the last must be [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], self.body
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.fixture(scope="session")
def chat_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small random model with a chat template."""
    directory = tmp_path_factory.mktemp("served") / "random"
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="package")
def server(chat_checkpoint: Path) -> Iterator[RunningServer]:
    running = RunningServer(create_api_server(chat_checkpoint, **OPTIONS)).wait_until_ready()
    yield running
    running.stop()
