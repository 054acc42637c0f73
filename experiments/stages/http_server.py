"""A workload served by an OpenAI server that runs elsewhere: requests at their times, every token's moment noted."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from experiments.planning.requests import requests_of
from experiments.schema import HttpWorkload, TraceWorkload
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from experiments.simulation.trace_files import read_trace
from tkernels.errors import TKernelsError

_DONE = "[DONE]"
_SILENCE_S = 600.0  # of a server, after which a request has failed; one that queues a request may be silent for long
_MOST_SAID = 300
"""Characters of a server's own words that a row keeps."""


class HttpServerError(TKernelsError, RuntimeError):
    """A server cannot be reached, or does not say what its model is called."""


@dataclass(frozen=True, kw_only=True)
class HttpServed(Served):
    """A round as the client saw it. A token's moment is when the chunk came that brought it; `tokens` are unknown.

    lengths: output tokens of each request, 0 where it failed. num_good: the requests that met the workload's slo; None
    where it has none.
    """

    lengths: tuple[int, ...]
    num_good: int | None

    @property
    def output_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def goodput(self) -> float | None:
        """Requests a second that met the slo."""
        return None if self.num_good is None else self.num_good / self.seconds


@dataclass
class _Stream:
    """What came of one request. moments: seconds after it was due, of each token."""

    moments: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    error: str | None = None


class HttpServer:
    """Serves the whole workload once per call, over HTTP. Leave its context to close its connections.

    Every round's prompts are drawn anew, so that none finds in a prefix cache what an earlier one left;
    texts, which are what they are, do.

    Raises:
        HttpServerError: Nobody answers at the workload's url, or it serves several models and none is named.
    """

    def __init__(self, workload: HttpWorkload) -> None:
        self.workload = workload
        self._numbers = count()
        self._runner = asyncio.Runner()
        key = None if workload.key_file is None else Path(workload.key_file).read_text(encoding="utf-8").strip()
        self._client = httpx2.AsyncClient(
            base_url=f"{workload.url}/v1",
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx2.Timeout(_SILENCE_S, connect=10.0, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        try:
            self.served_model = workload.served_model or self._runner.run(self._find_model())
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "HttpServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def __call__(self) -> HttpServed:
        number = next(self._numbers)
        requests = draw_round(self.workload, number)
        return self._runner.run(self._serve(requests, arrival_times(self.workload, len(requests), number)))

    async def _find_model(self) -> str:
        try:
            answer = await self._client.get("/models")
            names = [str(one["id"]) for one in answer.raise_for_status().json()["data"]]
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            said = str(error) or type(error).__name__
            if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code == 401:
                said = "401, it wants a key: give key_file"
            raise HttpServerError(f"no OpenAI server answers at {self.workload.url}: {said[:_MOST_SAID]}") from None
        if len(names) != 1:
            raise HttpServerError(
                f"{self.workload.url} serves {', '.join(names) or 'no model'}: name one, served_model"
            )
        return names[0]

    async def _serve(self, requests: Sequence[Request], arrivals: Sequence[float]) -> HttpServed:
        streams = [_Stream() for _ in requests]
        places = asyncio.Semaphore(self.workload.in_flight) if self.workload.in_flight is not None else nullcontext()
        start = time.perf_counter()

        async def follow(request: Request, stream: _Stream, due: float) -> None:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            async with places:
                await self._follow(request, stream, start + due)

        async with asyncio.TaskGroup() as group:
            for request, stream, due in zip(requests, streams, arrivals, strict=True):
                group.create_task(follow(request, stream, due))
        seconds = time.perf_counter() - start
        return HttpServed(
            tokens=tuple(() if one.error is None else None for one in streams),
            prompt_tokens=sum(one.prompt_tokens for one in streams),
            seconds=seconds,
            moments=tuple(tuple(one.moments) if one.error is None else () for one in streams),
            error=next((one.error for one in streams if one.error is not None), None),
            lengths=tuple(len(one.moments) if one.error is None else 0 for one in streams),
            num_good=_count_good(self.workload, streams),
        )

    async def _follow(self, request: Request, stream: _Stream, due: float) -> None:
        """Sends a request and follows its stream; whatever goes wrong is its own."""
        try:
            body = make_body(self.workload, request, self.served_model)
            async with self._client.stream("POST", "/completions", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise HttpServerError(f"{response.status_code}: {' '.join(text.split())}")
                async for chunk in _read_events(response.aiter_bytes()):
                    _note_chunk(stream, chunk, time.perf_counter() - due, request.params.max_tokens)
        except (httpx2.HTTPError, HttpServerError, ValueError, RecursionError) as error:
            stream.error = (str(error) or type(error).__name__)[:_MOST_SAID]


def draw_round(workload: HttpWorkload, number: int) -> list[Request]:
    """The requests of a round: other token ids in each, and other lengths where they are drawn."""
    requests = workload.requests
    if hasattr(requests, "seed"):
        requests = requests.model_copy(update={"seed": requests.seed + number})
    return requests_of(requests, workload.vocab_size or 1)


def arrival_times(workload: HttpWorkload, num_requests: int, number: int) -> list[float]:
    """Seconds after the round's start at which each request comes."""
    if workload.rate is not None:
        gaps = np.random.default_rng((number, 2)).exponential(1 / workload.rate, num_requests)
        times: list[float] = np.cumsum(gaps).tolist()
        return times
    if workload.speed is not None and isinstance(workload.requests, TraceWorkload):
        lines = zip(range(num_requests), read_trace(workload.requests.file), strict=False)
        return [line.arrival / workload.speed for _, line in lines]
    return [0.0] * num_requests


def make_body(workload: HttpWorkload, request: Request, served_model: str) -> dict[str, Any]:
    """A request of /v1/completions. Beyond OpenAI's own fields it says what it needs by vLLM's names, if anything."""
    params = request.params
    body = {
        "model": served_model,
        "prompt": request.prompt,
        "stream": True,
        # Where several tokens come in a chunk, usage tells how many.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **workload.requests.sampling,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
    }
    if params.temperature > 0:
        body["seed"] = params.seed
    if params.ignore_eos:
        body["ignore_eos"] = True
    if request.priority:
        body["priority"] = request.priority
    if workload.requests.tenants > 1:
        body["cache_salt"] = f"tenant {request.tenant}"
    return body


async def _split_lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The lines of a stream, which "\\n" ends and no other character: a text may have U+2028 in it."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode("utf-8")


async def _read_events(parts: AsyncIterator[bytes]) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON of each event of a stream.

    Raises:
        HttpServerError: The server sent an error, or ended the stream without saying so.
    """
    async for line in _split_lines(parts):
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == _DONE:
            return
        event = json.loads(data)
        if not isinstance(event, dict) or (error := event.get("error")):
            said = error.get("message", error) if isinstance(event, dict) and isinstance(error, dict) else data
            raise HttpServerError(str(said))
        yield event
    raise HttpServerError(f"the stream ended without {_DONE}")


def _note_chunk(stream: _Stream, chunk: Mapping[str, Any], moment: float, max_tokens: int | None) -> None:
    """Gives each token that a chunk brought its moment: by its usage, or one for a chunk that says none.

    Raises:
        HttpServerError: It is no chunk of a completion of `max_tokens`.
    """
    try:
        usage = chunk.get("usage") or {}
        prompt_tokens = int(usage.get("prompt_tokens", stream.prompt_tokens))
        has_text = any(choice.get("text") for choice in chunk.get("choices") or ())
        known = int(usage.get("completion_tokens", len(stream.moments) + has_text))
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise HttpServerError(f"no chunk of a completion: {json.dumps(chunk)}") from None
    if max_tokens is not None and known > max_tokens:
        raise HttpServerError(f"the server counts {known} tokens where {max_tokens} were asked for")
    stream.prompt_tokens = prompt_tokens
    stream.moments += [moment] * (known - len(stream.moments))


def _count_good(workload: HttpWorkload, streams: Sequence[_Stream]) -> int | None:
    """The requests that met the workload's objective; None where it has none."""
    slo = workload.slo
    if slo is None:
        return None

    def is_good(stream: _Stream) -> bool:
        moments = stream.moments
        if stream.error is not None or not moments:
            return False
        tpot = (moments[-1] - moments[0]) / (len(moments) - 1) if len(moments) > 1 else 0.0
        in_time = slo.ttft_ms is None or moments[0] * 1e3 <= slo.ttft_ms
        return in_time and (slo.tpot_ms is None or tpot * 1e3 <= slo.tpot_ms)

    return sum(map(is_good, streams))
