"""A request in the engine: its sequence, its text, its log-probabilities and the moments of its life."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from tsched.execution.prompt_logprobs import PromptScores
from tsched.execution.sampler import TokenLogprobs
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.errors import RequestFault
from tsched.requests.grammar import GrammarState
from tsched.requests.outputs import Logprob, RequestMetrics
from tsched.requests.stopping import should_stop
from tsched.requests.token_texts import TokenTexts
from tsched.scheduling.sequence import Ints, Sequence

AT_FAULT = "a kernel, the weights or the dtype's range is at fault"


@dataclass(eq=False, slots=True)
class Request:
    """A sequence in the engine and the results that its owner reads.

    Attributes:
        sequence: The scheduler's.
        arrival_time: Seconds on time.perf_counter's clock.
        detokenizer: Makes the text; None where there is no tokenizer. The engine appends to it where it has stop
            strings to find; elsewhere the owner appends, when somebody wants the text.
        first_scheduled_time: When it first got a row, in seconds on the same clock; None before.
        first_token_time: Seconds on the same clock; None before.
        finish_time: Seconds on the same clock; None before.
        logprobs: For each output token, where the request asks for them.
        grammar: How far the output has come in its grammar, where it has one.
        prompt_scores: The prompt's log-probabilities, where the request asks for them.
        error: Why it failed; None where it did not.
        at_fault: The field of its parameters that made it fail; None where none did.
        stops_at_text: Whether the engine looks for stop strings in its text.
        is_watched: Whether the engine must inspect each of its tokens.
    """

    sequence: Sequence
    arrival_time: float
    detokenizer: IncrementalDetokenizer | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    grammar: GrammarState | None = None
    prompt_scores: PromptScores | None = None
    error: str | None = None
    at_fault: str | None = None
    stops_at_text: bool = field(init=False)
    is_watched: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.sequence.params
        self.stops_at_text = self.detokenizer is not None and bool(params.stop_strings)
        stops_early = self.stops_at_text or self.grammar is not None or bool(params.criteria)
        # With max_tokens 0 its one token is dropped.
        self.is_watched = params.max_tokens != 0 and (stops_early or params.logprobs is not None)

    @property
    def has_textless_end(self) -> bool:
        """Whether its last token ended it and is to have no text."""
        return self.sequence.ended_by_token and not self.sequence.params.include_stop_str_in_output

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token that ended it; None where neither did."""
        if self.sequence.finish_reason != "stop":
            return None
        found = None if self.detokenizer is None else self.detokenizer.found_stop
        return self.sequence.stop_id if found is None else found

    def look_for_stop(self, token_id: int, *, may_stop: bool) -> str | None:
        """Appends a new token to the text.

        Args:
            token_id: The token.
            may_stop: Whether to look for stop strings.

        Returns:
            "stop" where one was found, "error" where the tokenizer fails, else None.
        """
        if self.detokenizer is None or self.has_textless_end:
            return None
        try:
            self.detokenizer.append(token_id, may_stop=may_stop)
        except RequestFault as fault:
            self.error = self.error or str(fault)
            return "error"
        return "stop" if self.detokenizer.is_stopped else None

    def ask_criteria(self, known: Ints) -> str | None:
        """Asks its stopping criteria about the tokens `known` [n] of its sequence, read-only.

        Returns:
            "stop" where one of them ends the output, "error" where one fails, else None.
        """
        prompt, output = known[: self.sequence.prompt_len], known[self.sequence.prompt_len :]
        try:
            return "stop" if should_stop(self.sequence.params.criteria, prompt, output) else None
        except RequestFault as fault:
            self.error = str(fault)
            return "error"

    def advance_grammar(self, token: int) -> str | None:
        """Appends a new token to its grammar. Returns why it ends the output; None where it does not."""
        grammar, sequence = self.grammar, self.sequence
        if grammar is None or sequence.finish_reason not in (None, "length"):  # an end token is no part of the form
            return None
        if not grammar.append(token):
            return None
        if grammar.error is not None:
            if self.error is None:
                self.error, self.at_fault = grammar.error, "structured_outputs"
            return "error"
        if sequence.finish_reason is not None:  # complete, if just at its longest
            sequence.finish_reason = "stop"
        return "stop"

    def finish(self, now: float) -> None:
        """Completes its text and times: its sequence has finished, at `now` on time.perf_counter's clock."""
        self.finish_time = now
        if self.prompt_scores is not None and self.prompt_scores.has_nan and self.error is None:
            self.fail(f"the model's logits for the prompt's tokens are not finite: {AT_FAULT}")
        if self.detokenizer is not None and self.stops_at_text:
            try:
                self.detokenizer.finish()
            except RequestFault as fault:
                self.fail(str(fault))
            if self.detokenizer.is_stopped and self.error is None:
                # The last token may have reached a length limit too; a stop string comes first.
                self.sequence.finish_reason = "stop"

    def fail(self, why: str) -> None:
        """Ends it in an error; the first one stays."""
        self.error, self.sequence.finish_reason = self.error or why, "error"


def label_places(places: Items[TokenLogprobs], texts: TokenTexts) -> list[dict[int, Logprob]]:
    """Labels the log-probabilities of each of `places`; RequestFault where the tokenizer fails."""
    return [texts.label_logprobs(place.token_ids, place.logprobs, place.ranks) for place in places]


def label_prompt(request: Request, texts: TokenTexts) -> list[dict[int, Logprob] | None] | None:
    """Labels the log-probabilities of the prompt's tokens, of which the first has none.

    Returns:
        One for each token; None where nobody asks for them, or they are not known yet.

    Raises:
        RequestFault: The tokenizer fails.
    """
    scores = request.prompt_scores
    return None if scores is None or not scores.is_complete else [None, *label_places(scores.found, texts)]


def extend_text(request: Request, token_ids: Items[int], *, is_over: bool) -> str:
    """Makes the text of a request's next tokens, where the engine finds no stop strings in it.

    Args:
        request: With a detokenizer or without one.
        token_ids: Those since the last call.
        is_over: Whether they are the last.

    Returns:
        The text that became final; all of it where they are the last.

    Raises:
        RequestFault: The tokenizer fails.
    """
    detokenizer = request.detokenizer
    if detokenizer is None:
        return ""
    if not is_over:
        return "".join([detokenizer.append(token_id) for token_id in token_ids])
    if request.has_textless_end:
        token_ids = token_ids[:-1]
    return "".join([*(detokenizer.append(token_id) for token_id in token_ids), detokenizer.finish()])


def joint_metrics(requests: Items[Request]) -> RequestMetrics:
    """The metrics of the samples [n >= 1] of one request: from their first token to the last one's end."""
    scheduled = [request.first_scheduled_time for request in requests if request.first_scheduled_time is not None]
    begun = [request.first_token_time for request in requests if request.first_token_time is not None]
    ended = [request.finish_time for request in requests if request.finish_time is not None]
    return RequestMetrics(
        requests[0].arrival_time,
        min(begun) if begun else None,
        max(ended) if len(ended) == len(requests) else None,
        sum(request.sequence.num_preemptions for request in requests),
        min(scheduled, default=None),
    )


def count_cached_tokens(requests: Items[Request]) -> int | None:
    """The tokens of a prompt that the prefix cache had; None where none of its samples has run.

    One sample computes the prompt and the others follow it, with more of it there.
    """
    found = [request.sequence.num_cached for request in requests if request.sequence.num_cached is not None]
    return min(found, default=None)


def joint_error(requests: Items[Request]) -> str | None:
    """Why samples of one request failed, with their indices where it has several; None where none failed."""
    errors = [(index, request.error) for index, request in enumerate(requests) if request.error is not None]
    if len(requests) == 1:
        return errors[0][1] if errors else None
    return "; ".join(f"completion {index}: {error}" for index, error in errors) or None


def joint_fault(requests: Items[Request]) -> str | None:
    """The field of their parameters that made samples of one request fail; None where any failed of something else."""
    faults = {request.at_fault for request in requests if request.error is not None}
    return faults.pop() if len(faults) == 1 else None
