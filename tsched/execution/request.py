"""A request in the engine: its sequence, its text, its log-probabilities and the moments of its life."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from tsched.execution.prompt_logprobs import PromptScores
from tsched.execution.sampler import TokenLogprobs
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.grammar import GrammarState
from tsched.requests.outputs import Logprob, RequestMetrics
from tsched.requests.token_texts import TokenTexts
from tsched.scheduling.sequence import Sequence


@dataclass(eq=False, slots=True)
class Request:
    """A sequence in the engine and the results that its owner reads.

    Attributes:
        sequence: The scheduler's.
        arrival_time: Seconds on time.perf_counter's clock.
        detokenizer: Makes the text; None where there is no tokenizer. The engine appends to it where it has stop
            strings to find; elsewhere the owner appends, when somebody wants the text.
        first_token_time: Seconds on the same clock; None before.
        finish_time: Seconds on the same clock; None before.
        logprobs: For each output token, where the request asks for them.
        grammar: How far the output has come in its grammar, where it has one.
        prompt_scores: The prompt's log-probabilities, where the request asks for them.
        error: Why it failed; None where it did not.
    """

    sequence: Sequence
    arrival_time: float
    detokenizer: IncrementalDetokenizer | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    grammar: GrammarState | None = None
    prompt_scores: PromptScores | None = None
    error: str | None = None

    @property
    def stops_at_text(self) -> bool:
        """Whether the engine looks for stop strings in its text."""
        return self.detokenizer is not None and bool(self.sequence.params.stop_strings)

    @property
    def is_watched(self) -> bool:
        """Whether the engine must inspect each of its tokens."""
        params = self.sequence.params
        if params.max_tokens == 0:  # its one token is dropped
            return False
        stops_early = self.stops_at_text or self.grammar is not None or bool(params.criteria)
        return stops_early or params.logprobs is not None

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


def extend_text(detokenizer: IncrementalDetokenizer, token_ids: Items[int], *, is_over: bool) -> str:
    """Appends `token_ids` and returns the text that became final; all of it where they are the last."""
    if len(token_ids) == 1 and not is_over:
        return detokenizer.append(token_ids[0])
    text = "".join([detokenizer.append(token_id) for token_id in token_ids])
    return text + detokenizer.finish() if is_over else text


def joint_metrics(requests: Items[Request]) -> RequestMetrics:
    """The metrics of the samples [n >= 1] of one request: from their first token to the last one's end."""
    begun = [request.first_token_time for request in requests if request.first_token_time is not None]
    ended = [request.finish_time for request in requests if request.finish_time is not None]
    return RequestMetrics(
        requests[0].arrival_time,
        min(begun) if begun else None,
        max(ended) if len(ended) == len(requests) else None,
        sum(request.sequence.num_preemptions for request in requests),
    )


def joint_error(requests: Items[Request]) -> str | None:
    """Why samples of one request failed, with their indices where it has several; None where none failed."""
    errors = [(index, request.error) for index, request in enumerate(requests) if request.error is not None]
    if len(requests) == 1:
        return errors[0][1] if errors else None
    return "; ".join(f"completion {index}: {error}" for index, error in errors) or None
