"""The outputs of a request. Names are vLLM's where vLLM has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token at one place of the output. There are many: a tuple is made in half of a dataclass's time.

    Attributes:
        logprob: Its natural log-probability before any penalty or filter.
        rank: Its rank by probability, from 1.
        decoded_token: Its text; None where there is no tokenizer.
        token_bytes: The bytes that it adds to a text, where half a character may be some; None where nobody knows.
    """

    logprob: float
    rank: int
    decoded_token: str | None
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments of a request in seconds on `time.perf_counter`'s clock; None where it did not get that far.

    Attributes:
        arrival_time: When the caller submitted it.
        first_token_time: When its first output token was known.
        finish_time: When it ended.
        num_preemptions: How often it gave way to others.
        first_scheduled_time: When the engine first computed something of it.
    """

    arrival_time: float
    first_token_time: float | None
    finish_time: float | None
    num_preemptions: int = 0
    first_scheduled_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first output token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def queue_time(self) -> float | None:
        """Seconds that it waited before the engine computed anything of it."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first step with a part of its prompt to the first output token."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first output token to the end."""
        return _between(self.first_token_time, self.finish_time)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last output token."""
        return _between(self.arrival_time, self.finish_time)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: Of the completion, below SamplingParams.n.
        token_ids: Its tokens, with the token that ended it, where one did.
        text: As SamplingParams has it: without special tokens, stop strings and the token that ended the output,
            unless those are asked for. "" where there is no tokenizer.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        logprobs: For each output token, token id -> log-probability, of the chosen and the most likely tokens; None
            unless asked for.
        cumulative_logprob: The sum over the output tokens; None unless logprobs were asked for.
        stop_reason: The stop string, or the id of stop_token_ids, that ended it; None where neither did.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's prompt and completions.

    LLM returns it whole. AsyncLLM.generate yields all that there is so far. AsyncLLM.add_request yields it in parts. A
    part holds the token_ids, text and logprobs that came since the part before, so the parts together are the whole;
    its cumulative_logprob is the sum so far. A part leaves out completions with nothing new.

    Attributes:
        request_id: The caller's, or a number.
        prompt: The prompt's text; None where it was token ids.
        prompt_token_ids: The prompt's token ids.
        outputs: The completions by index, SamplingParams.n of them.
        metrics: When the request began and ended.
        prompt_logprobs: For each prompt token, token id -> log-probability, of that token and the most likely ones;
            None for the first token. None unless asked for, in later parts, and where the prompt was not computed.
        num_cached_tokens: Tokens of the prompt that the prefix cache had; None until the engine first computed
            something of it.
        error: Why it failed, with n > 1 for each completion that failed; None where none did.
        finished: Whether this is the last part.
    """

    request_id: int | str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None


def add_part(whole: RequestOutput | None, part: RequestOutput) -> RequestOutput:
    """The output so far: `whole`, of the parts before, and the next `part`; None before the first."""
    if whole is None:
        return part
    by_index = {one.index: one for one in whole.outputs}
    for one in part.outputs:
        before = by_index.get(one.index)
        by_index[one.index] = one if before is None else _joined(before, one)
    outputs = [by_index[index] for index in sorted(by_index)]
    return replace(part, outputs=outputs, prompt_logprobs=part.prompt_logprobs or whole.prompt_logprobs)


def _joined(before: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if new.logprobs is None else [*(before.logprobs or ()), *new.logprobs]
    return replace(new, token_ids=[*before.token_ids, *new.token_ids], text=before.text + new.text, logprobs=logprobs)
