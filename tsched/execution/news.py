"""What an online engine tells of its requests after each step, and the tickets by which these are known."""

from __future__ import annotations

from dataclasses import dataclass, field

from tsched.execution.request import Request, joint_fault
from tsched.execution.sampler import TokenLogprobs
from tsched.requests.outputs import CompletionOutput, Logprob, RequestMetrics
from tsched.requests.prompts import PreparedRequest


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way through the engine, and its submitter's name for it.

    `num_cached_tokens`, `refusal` and `failure` are written before the news that they are about; the engine's thread
    alone uses the rest.

    Attributes:
        prepared: The request as submitted.
        requests: The engine's request of each sample.
        num_going: Samples whose end has not been told.
        has_told_prompt: Whether news have had the prompt's log-probabilities.
        metrics: As of the last news that changed them.
        num_cached_tokens: Of the prompt, as of the same news; None before the first.
        refusal: Why the engine never took the request.
        failure: The engine's exception that ended the request with the thread.
    """

    prepared: PreparedRequest
    requests: list[Request] = field(default_factory=list)
    num_going: int = 0
    has_told_prompt: bool = False
    metrics: RequestMetrics = field(init=False)
    num_cached_tokens: int | None = None
    refusal: str | None = None
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.metrics = RequestMetrics(self.prepared.arrival_time, None, None)

    @property
    def at_fault(self) -> str | None:
        """The field of the request's parameters that made it fail; None where none did, and before its last news."""
        return None if self.num_going else joint_fault(self.requests)


@dataclass(eq=False, slots=True)
class News:
    """What is new of one sample of a request, ready to send.

    Attributes:
        ticket: Of the request: `ticket.prepared.request_id` is its name.
        index: Of the sample.
        token_ids: New ones.
        text: What they make final.
        metrics: Of the request.
        scores: Log-probabilities of the new tokens; None unless asked for.
        logprobs: The same with the texts of tokens; None where the thread makes none.
        logprob_sum: Over all tokens of the sample so far; None unless asked for.
        finish_reason: At the sample's end, None before.
        stop_reason: The stop string or stop token that ended it, where one did.
        is_last: Whether no other news of the request follow, of any sample.
        error: With the last news: why samples failed; None where none did.
        prompt_scores: Of the prompt's tokens but the first, once, with the first news of any sample; only where the
            request asks for them.
        prompt_logprobs: The same with the texts of tokens, None for the first; None where the thread makes none.
    """

    ticket: Ticket
    index: int
    token_ids: list[int]
    text: str
    metrics: RequestMetrics
    scores: list[TokenLogprobs] | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    logprob_sum: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    is_last: bool = False
    error: str | None = None
    prompt_scores: list[TokenLogprobs] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def completion(self) -> CompletionOutput:
        """The sample's news as in a delta of AsyncLLM."""
        return CompletionOutput(
            self.index, self.token_ids, self.text, self.finish_reason, self.logprobs, self.logprob_sum, self.stop_reason
        )
