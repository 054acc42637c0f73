"""What passes between the server's front end and an engine, here or in another process. Loads no torch.

The front end knows an engine as an `EngineClient`. Every record is of plain values, so JSON holds it: of the frozen
dataclasses `dataclasses.asdict` gives it, and the tuples of a `Delta` are its lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.torch_free import TKernelsError, suggest_name

State = Literal["loading", "ready", "restarting", "draining", "failed"]
"""Whether an engine takes requests: it does when "ready"; it will, or will again, when "loading" or "restarting"."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a served model once it is loaded.

    Attributes:
        name: What clients call it.
        created: When it was loaded, in seconds since 1970.
        max_model_len: Most tokens of a request, prompt and output together.
        vocab_size: Token ids are below it.
        eos_token_ids: They end an output.
        tokenizer_directory: Where its tokenizer's files lie; None where it has none.
        max_num_seqs: Most sequences in one step.
        num_cache_tokens: Tokens that the KV cache holds.
        block_size: Tokens in a block of it.
        arm: op -> the variant that serves it, when these facts were made.
    """

    name: str
    created: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_directory: str | None
    max_num_seqs: int
    num_cache_tokens: int
    block_size: int
    arm: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for an engine.

    Attributes:
        request_id: Unlike those of other unfinished requests.
        prompt_token_ids: [n] ids of the prompt.
        sampling: Keywords of SamplingParams, those that are not at their defaults, each a JSON value.
        priority: Lower goes first, with order="priority".
        cache_salt: Only requests of one salt share cached prefixes.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: Mapping[str, Any]
    priority: int = 0
    cache_salt: str = ""


class TokenScores(NamedTuple):
    """The log-probabilities at one place of a text.

    Attributes:
        token_ids: The place's own token first, then the most likely ones that were asked for, the likeliest first.
        logprobs: Theirs, natural.
    """

    token_ids: list[int]
    logprobs: list[float]


class SampleDelta(NamedTuple):
    """What is new in one completion of a request.

    Attributes:
        sample: Index of the completion, below `n`.
        token_ids: New ones.
        text: What they make final; it may lag behind them by a held back character or stop string.
        logprobs: One for each new token; None unless asked for.
        finish_reason: "stop", "length", "abort" or "error" at the completion's end, None before.
        stop_reason: The stop string or stop token that ended it, where one did.
    """

    sample: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenScores] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class RequestTimes(NamedTuple):
    """Seconds that a request waited, was prefilled, and was decoded."""

    queue: float
    prefill: float
    decode: float


class Delta(NamedTuple):
    """What is new in one request since the delta before.

    Attributes:
        samples: The completions with something new.
        is_last: Whether no other follows.
        error: Why completions ended with finish_reason "error"; None where none did.
        num_cached_tokens: Prompt tokens found in the prefix cache; None until known.
        prompt_logprobs: One for each prompt token, None for the first; in one delta, and only if asked for.
        times: In the last delta.
        at_fault: The field of SamplingParams that is to blame for `error`; None where the engine is.
        starts_over: Whether what came before is void: another engine serves the request anew.
    """

    samples: list[SampleDelta]
    is_last: bool
    error: str | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenScores | None] | None = None
    times: RequestTimes | None = None
    at_fault: str | None = None
    starts_over: bool = False


def count_numbers(token_ids: Sequence[int], logprobs: Sequence[Sized] | None) -> int:
    """Token ids and log-probabilities of a part of a completion, which are nearly all of its memory.

    Args:
        token_ids: New ones.
        logprobs: Of each place those of its tokens; None unless asked for.
    """
    return len(token_ids) + sum(map(len, logprobs or ()))


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """An engine's counts after a step: sums since it was made, and what is there now.

    Attributes:
        num_running: Sequences in the batch.
        num_waiting: Sequences that wait for a place in it.
        num_blocks: Of the KV cache.
        num_used_blocks: Of them, those that sequences hold.
        num_steps: Sum.
        num_prompt_tokens: Sum of prompt tokens computed.
        num_output_tokens: Sum.
        num_preemptions: Sum.
        num_cache_queries: Sum of prompt tokens looked up in the prefix cache.
        num_cache_hits: Sum of those found there.
        num_restarts: How often the engine was started anew.
        arm: op -> the variant that serves it.
        phase_seconds: Phase of a step, or "step" -> sum of the host's seconds in it.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_cache_queries: int
    num_cache_hits: int
    num_restarts: int = 0
    arm: Mapping[str, str] = field(default_factory=dict)
    phase_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelSwap:
    """A swap of kernels that was made.

    Attributes:
        first_step: Number of the first step over the new kernels, counted from 0 since the engine was made.
        arm: op -> the variant that serves it from then on.
    """

    first_step: int
    arm: Mapping[str, str]


class RequestRefusedError(RefusedError):
    """The engine cannot take this request, now or later.

    Args:
        message: Why.
        param: The request's field that is wrong, by its name in SamplingParams or "prompt"; None where it is none.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def default_name(model: str | Path) -> str:
    """What clients call a model that is given no other name: its directory's, or the preset or hub id as it is."""
    return Path(model).resolve().name if Path(model).is_dir() else str(model)


def read_sampling(sampling: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of an EngineRequest.

    Raises:
        RequestRefusedError: One is unknown or has a wrong value.
    """
    known = [one.name for one in fields(SamplingParams)]
    for name in sampling:
        if name not in known:
            raise RequestRefusedError(f"there is no parameter {name!r}{suggest_name(name, known)}", name)
    given = dict(sampling)
    if isinstance(given.get("logit_bias"), Mapping):  # keys of JSON are texts
        given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
    try:
        return SamplingParams(**given)
    except ValueError as error:  # its messages name the field
        message = str(error)
        words = re.findall(r"\w+", message)
        raise RequestRefusedError(message, next((word for word in words if word in sampling), None)) from error


class EngineUnavailableError(TKernelsError, RuntimeError):
    """The engine takes no request now: it loads, restarts or drains.

    Args:
        message: Why.
        retry_after: Seconds after which to ask again.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineFailedError(TKernelsError, RuntimeError):
    """The engine, or its process, failed while it served the request, or failed for good. The message has no stack."""


class DeltaStream(Protocol):
    """The deltas of one request, for one consumer. A cancelled consumer aborts the request.

    Attributes:
        may_start_over: Whether the consumer takes a delta that starts over; False until it says so.
    """

    may_start_over: bool

    def __aiter__(self) -> DeltaStream: ...

    async def __anext__(self) -> Delta:
        """The next delta, with all that has come since the last.

        Raises:
            StopAsyncIteration: The last one was given.
            RequestRefusedError: The engine cannot take the request.
            EngineFailedError: The engine failed while it served the request.
        """

    @property
    def num_unread(self) -> int:
        """Numbers that wait to be taken, see `count_numbers`."""

    async def aclose(self) -> None:
        """Aborts the request, unless it has finished, and ends the iteration."""


class EngineClient(Protocol):
    """An engine as the server's front end knows it. All of it is called on one event loop."""

    @property
    def state(self) -> State:
        """Whether requests are taken."""

    @property
    def facts(self) -> ModelFacts:
        """Of the model; EngineUnavailableError until it was loaded once."""

    async def start(self) -> None:
        """Loads the model and returns when it is ready; whatever the loading raises is raised here."""

    def check_open(self) -> None:
        """Checks that new requests are to be let in.

        Raises:
            EngineUnavailableError: None are now. One that was let in before may be submitted, unless the engine drains.
            EngineFailedError: The engine failed for good.
        """

    def submit(self, *requests: EngineRequest) -> Sequence[DeltaStream]:
        """Begins to serve requests, all before the same step of the engine; while it restarts, they wait for it.

        Raises:
            RequestRefusedError: The sampling parameters of one are none.
            EngineUnavailableError: No request is taken now.
            EngineFailedError: The engine failed for good.
        """

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; nothing happens where no unfinished one has this name."""

    def stats(self) -> StatsSnapshot:
        """The last step's snapshot; it waits for nothing. EngineUnavailableError until the model was loaded once."""

    def listen(self, on_stats: Callable[[StatsSnapshot], None]) -> None:
        """Calls `on_stats` with the newest snapshot after steps that had news, from now on."""

    async def swap_kernels(self, choices: Mapping[str, Any]) -> KernelSwap:
        """Swaps kernels between two steps. An engine that is started again begins with them.

        Args:
            choices: {op: variant} or {op: {variant: {config value: number}}}, as an experiment's `kernels`; an op that
                is left out keeps its variant, and None asks for the op's default.

        Raises:
            RequestRefusedError: A choice is unknown, or does not support the model; nothing has changed then.
            EngineUnavailableError: The engine is not ready.
        """

    async def close(self) -> None:
        """Aborts what is unfinished and ends the engine, in any state."""
