"""An engine in this process as the server's front end knows one: `AsyncLLM` behind `EngineClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsched.options import read_options
from tsched.requests.errors import UsageError
from tsched.serving.engine_client import (
    Delta,
    EngineFailedError,
    EngineRequest,
    EngineUnavailableError,
    KernelSwap,
    ModelFacts,
    RequestRefusedError,
    State,
    StatsSnapshot,
    count_numbers,
    default_name,
    read_sampling,
)
from tsched.serving.engine_records import (
    describe_error,
    describe_failure,
    describe_model,
    make_prompt_scores,
    make_sample,
    make_times,
    read_stats,
)

if TYPE_CHECKING:  # both load torch, and the server answers before that is there
    from tsched.async_llm import AsyncLLM, RequestStream
    from tsched.execution.phase_times import PhaseTimes


class LocalClient:
    """Serves one model on the threads of this process.

    Args:
        model: As of `AsyncLLM`.
        name: What clients call it; the name of its directory, preset or hub id by default.
        options: As of `AsyncLLM`. TypeError or OptionError says at once where one is wrong.
    """

    def __init__(self, model: str | Path, name: str | None = None, **options: Any) -> None:
        read_options(options)
        self._model, self._options = model, options
        self._name = name or default_name(model)
        self._llm: AsyncLLM | None = None
        self._facts: ModelFacts | None = None
        self._is_closing = False
        self._times: PhaseTimes | None = None
        self._listeners: list[Callable[[StatsSnapshot], None]] = []
        self._num_steps_told = 0

    @property
    def state(self) -> State:
        if self._is_closing:
            return "draining"
        if self._llm is None:
            return "loading"
        return "ready" if self._llm.is_running else "failed"

    @property
    def facts(self) -> ModelFacts:
        if self._facts is None:
            raise EngineUnavailableError("the model is being loaded", retry_after=2.0)
        return self._facts

    async def start(self) -> None:
        """Loads the model on a thread of its own: the event loop goes on."""
        llm = await asyncio.to_thread(self._load)
        await llm.__aenter__()
        self._facts = describe_model(llm, self._name)
        self._llm = llm

    def check_open(self) -> None:
        self._running()

    def submit(self, *requests: EngineRequest) -> list[LocalStream]:
        from tsched.async_llm import EngineError

        llm = self._running()
        try:
            tickets = [
                llm.make_ticket(
                    one.request_id,
                    one.prompt_token_ids,
                    read_sampling(one.sampling),
                    priority=one.priority,
                    cache_salt=one.cache_salt,
                )
                for one in requests
            ]
            return [LocalStream(stream, self._tell_stats) for stream in llm.submit(*tickets)]
        except EngineError as error:  # it failed since we looked
            raise EngineFailedError(describe_failure(error.__cause__)) from error
        except UsageError as error:  # it was closed since
            raise _is_stopping() from error

    def abort(self, request_id: str) -> None:
        if self._llm is not None:
            self._llm.abort(request_id)

    def stats(self) -> StatsSnapshot:
        if self._llm is None:
            raise EngineUnavailableError("the model is being loaded", retry_after=2.0)
        return read_stats(self._llm, self._times)

    def listen(self, on_stats: Callable[[StatsSnapshot], None]) -> None:
        self._listeners.append(on_stats)

    def _tell_stats(self) -> None:
        """Tells the listeners of steps that they have not heard of."""
        if self._listeners and self._llm is not None:
            num_steps = self._llm.stats().num_steps
            if num_steps != self._num_steps_told:
                self._num_steps_told = num_steps
                for listener in self._listeners:
                    listener(self.stats())

    async def swap_kernels(self, choices: Mapping[str, Any]) -> KernelSwap:
        from tkernels import SelectionError
        from tsched.async_llm import EngineError

        llm = self._running()
        try:
            return KernelSwap(await llm.swap_kernels(choices), llm.arm)
        except SelectionError as error:
            raise RequestRefusedError(str(error), "kernels") from error
        except EngineError as error:
            raise EngineFailedError(describe_failure(error.__cause__)) from error
        except UsageError as error:
            raise _is_stopping() from error
        except Exception as error:  # memory for weights in another layout, say
            raise RequestRefusedError(describe_error(error), "kernels") from error

    async def close(self) -> None:
        self._is_closing = True
        if self._llm is not None:
            await self._llm.close()

    def _load(self) -> AsyncLLM:
        import tkernels  # noqa: F401  before anything that imports Triton
        from tkernels.ranges import NVTX
        from tsched.async_llm import AsyncLLM
        from tsched.execution.phase_times import PhaseTimes

        self._times = PhaseTimes(self._options.get("ranges") or NVTX)
        llm = AsyncLLM(self._model, **self._options | {"ranges": self._times})
        llm.warm_up()
        return llm

    def _running(self) -> AsyncLLM:
        if self._is_closing:
            raise _is_stopping()
        if self._llm is None:
            raise EngineUnavailableError("the model is being loaded", retry_after=2.0)
        if not self._llm.is_running:
            raise EngineFailedError("the engine has failed")
        return self._llm


def _is_stopping() -> EngineUnavailableError:
    return EngineUnavailableError("the server is stopping and takes no more requests", retry_after=5.0)


class LocalStream:
    """The deltas of a request of `AsyncLLM`."""

    def __init__(self, stream: RequestStream, on_news: Callable[[], None]) -> None:
        self.may_start_over = False  # there is no other engine
        self._stream = stream
        self._on_news = on_news

    def __aiter__(self) -> LocalStream:
        return self

    async def __anext__(self) -> Delta:
        from tsched.async_llm import EngineError

        try:
            output = await self._stream.__anext__()
            self._on_news()
        except EngineError as error:
            raise EngineFailedError(describe_failure(error.__cause__)) from error
        refusal = self._stream.refusal
        if refusal is not None:
            raise RequestRefusedError(refusal, "prompt")
        return Delta(
            [make_sample(one) for one in output.outputs],
            output.finished,
            output.error,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=make_prompt_scores(output.prompt_logprobs),
            times=make_times(output.metrics) if output.finished else None,
            at_fault=None if output.error is None else self._stream.at_fault,
        )

    @property
    def num_unread(self) -> int:
        return sum(count_numbers(one.token_ids, one.logprobs) for one in self._stream.unread)

    async def aclose(self) -> None:
        await self._stream.aclose()
