"""An engine's client that answers as a test says: tokens at a pace, failures, silence. No model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tsched.serving.engine_client import (
    Delta,
    EngineFailedError,
    EngineRequest,
    EngineUnavailableError,
    KernelSwap,
    ModelFacts,
    RequestTimes,
    SampleDelta,
    State,
    StatsSnapshot,
    TokenScores,
)


class ScriptedClient:
    """Gives token 5 and the text "x" every `pace` seconds.

    Args:
        tokenizer: The directory of one.
        pace: Seconds between tokens.
        first: Seconds before the first.
        holds_after: Tokens after which every stream waits for `may_go_on`.
        fails_after: Tokens after which every stream fails.
        width: Times that each token's text is repeated.
        num_unread: Numbers that wait in every stream.
    """

    def __init__(
        self,
        tokenizer: Path,
        *,
        pace: float = 0.0,
        first: float = 0.0,
        holds_after: int | None = None,
        fails_after: int | None = None,
        width: int = 1,
        num_unread: int = 0,
    ) -> None:
        self.state: State = "loading"
        self.num_unread = num_unread
        self.pace, self.first, self.fails_after, self.width = pace, first, fails_after, width
        self.holds_after, self.may_go_on = holds_after, asyncio.Event()
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.running: set[str] = set()
        self._tokenizer = tokenizer

    @property
    def facts(self) -> ModelFacts:
        if self.state == "loading":
            raise EngineUnavailableError("the model is being loaded")
        return ModelFacts("random", 1, 128, 300, (0,), str(self._tokenizer), 4, 256, 4)

    async def start(self) -> None:
        await self.may_load.wait()
        self.state = "ready"

    def check_open(self) -> None:
        if self.state == "restarting":
            raise EngineUnavailableError("the engine is being started again", 3.0)

    def submit(self, *requests: EngineRequest) -> list[ScriptedStream]:
        self.submitted += requests
        self.running |= {one.request_id for one in requests}
        return [ScriptedStream(self, one) for one in requests]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> StatsSnapshot:
        return StatsSnapshot(len(self.running), 0, 64, 0, 0, 0, 0, 0, 0, 0)

    def listen(self, listener: Callable[[StatsSnapshot], object]) -> None:
        """No step is taken here."""

    async def swap_kernels(self, choices: Mapping[str, Any]) -> KernelSwap:
        return KernelSwap(0, dict.fromkeys(choices, "torch"))

    async def close(self) -> None:
        self.state = "draining"


class ScriptedStream:
    def __init__(self, client: ScriptedClient, request: EngineRequest) -> None:
        self.may_start_over = False
        self._client, self._request, self._num_out, self._is_over = client, request, 0, False

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> Delta:
        client, sampling = self._client, self._request.sampling
        most = sampling["max_tokens"]
        if self._is_over:
            raise StopAsyncIteration
        await asyncio.sleep(client.pace if self._num_out else client.first)
        if self._num_out == client.holds_after:
            await client.may_go_on.wait()
        if self._num_out == client.fails_after:
            raise EngineFailedError("the worker was killed")
        num_new = min(1, most)
        self._num_out += num_new
        self._is_over = self._num_out == most
        if self._is_over:
            client.running.discard(self._request.request_id)
        count, ids = sampling.get("n", 1), [5] * num_new
        reason = "length" if self._is_over else None
        scores = None if sampling.get("logprobs") is None else [TokenScores([5], [-0.5])] * num_new
        samples = [SampleDelta(i, ids, "x" * client.width * num_new, scores, reason) for i in range(count)]
        prompt = None
        if sampling.get("prompt_logprobs") is not None and self._num_out <= 1:
            prompt = [None, *(TokenScores([one], [-1.0]) for one in self._request.prompt_token_ids[1:])]
        times = RequestTimes(0.0, 0.0, 0.0) if self._is_over else None
        return Delta(samples, self._is_over, prompt_logprobs=prompt, times=times)

    @property
    def num_unread(self) -> int:
        return self._client.num_unread

    async def aclose(self) -> None:
        if self._request.request_id in self._client.running:
            self._client.running.discard(self._request.request_id)
            self._client.aborted.append(self._request.request_id)
