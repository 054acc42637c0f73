"""What a request gets back. Names are vLLM's where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place: its natural log-probability before any penalty or filter, and its rank from 1."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments in seconds on `time.perf_counter`'s clock; None where the request did not get that far."""

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last output token."""
        return None if self.finish_time is None else self.finish_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion.

    token_ids           with the token that ended it, where one did
    text                without special tokens, cut off before a stop string; "" where there is no tokenizer
    finish_reason       "stop", "length", "abort" or "error"; None while it goes on
    logprobs            per output token, its own and the most likely tokens', by token id; None unless asked for
    cumulative_logprob  the sum over the output tokens; None unless logprobs were asked for
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's prompt and completions.

    LLM gives it whole. AsyncLLM gives parts of it, as deltas: a completion's token_ids, text and logprobs are what came
    since the part before, so that the parts put together are the whole; its cumulative_logprob is the sum so far; a
    completion that has nothing new is left out.

    outputs   by index, SamplingParams.n of them
    finished  whether this is the last part
    error     why it failed, None where it did not; with n > 1, of each completion that failed
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    finished: bool = True
