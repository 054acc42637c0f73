"""A loaded engine's own records as the front end knows them. Loads no torch itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tsched.serving.engine_client import Delta, ModelFacts, RequestTimes, SampleDelta, StatsSnapshot, TokenScores

if TYPE_CHECKING:  # they load torch, and who has an engine has loaded it
    from tsched.execution.news import News
    from tsched.execution.phase_times import PhaseTimes
    from tsched.execution.sampler import TokenLogprobs
    from tsched.execution.served_model import ServedModel
    from tsched.requests.outputs import CompletionOutput, Logprob, RequestMetrics


def describe_model(served: ServedModel, name: str) -> ModelFacts:
    """What clients may know of a model that was just loaded.

    Args:
        served: The model and its engine.
        name: What clients call it.
    """
    stats = served.stats()
    return ModelFacts(
        name=name,
        created=int(time.time()),
        max_model_len=served.max_model_len,
        vocab_size=served.config.vocab_size,
        eos_token_ids=tuple(served.config.eos_token_ids),
        tokenizer_directory=None if served.tokenizer is None else str(served.directory),
        max_num_seqs=served.max_num_seqs,
        num_cache_tokens=stats.num_blocks * stats.block_size,
        block_size=stats.block_size,
        arm=served.arm,
    )


def read_stats(served: ServedModel, times: PhaseTimes | None) -> StatsSnapshot:
    """The engine's counts now; `times` are those of its phases."""
    stats = served.stats()
    return StatsSnapshot(
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_blocks=stats.num_blocks,
        num_used_blocks=stats.num_used_blocks,
        num_steps=stats.num_steps,
        num_prompt_tokens=stats.num_prefill_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_preemptions=stats.num_preemptions,
        num_cache_queries=stats.prefix_cache.lookup_tokens,
        num_cache_hits=stats.prefix_cache.hit_tokens,
        arm=served.arm,
        phase_seconds={} if times is None else dict(times.seconds),
    )


def describe_failure(failure: BaseException | None) -> str:
    """The engine's failure as clients are told of it."""
    return f"the engine failed: {describe_error(failure)}"


def describe_error(error: BaseException | None) -> str:
    """An error's kind and the first line of its message, no stack."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}".rstrip(": ")


def make_sample(output: CompletionOutput) -> SampleDelta:
    """What is new in a completion."""
    scores = None if output.logprobs is None else [_forget_labels(place) for place in output.logprobs]
    return SampleDelta(output.index, output.token_ids, output.text, scores, output.finish_reason, output.stop_reason)


def make_times(metrics: RequestMetrics) -> RequestTimes:
    """The times of a request that is over; a phase that it did not reach took none."""
    queue = metrics.latency if metrics.queue_time is None else metrics.queue_time
    return RequestTimes(queue or 0.0, metrics.prefill_time or 0.0, metrics.decode_time or 0.0)


def make_prompt_scores(places: list[dict[int, Logprob] | None] | None) -> list[TokenScores | None] | None:
    """The log-probabilities of a prompt."""
    return None if places is None else [None if place is None else _forget_labels(place) for place in places]


def make_delta(news: News) -> Delta:
    """What is new in a sample of a request, of a thread that labels no log-probabilities."""
    prompt_scores: list[TokenScores | None] | None = None
    if news.prompt_scores is not None:
        prompt_scores = [None, *(make_scores(place) for place in news.prompt_scores)]
    return Delta(
        [
            SampleDelta(
                news.index, news.token_ids, news.text, describe_scores(news), news.finish_reason, news.stop_reason
            )
        ],
        news.is_last,
        news.error,
        num_cached_tokens=news.ticket.num_cached_tokens,
        prompt_logprobs=prompt_scores,
        times=make_times(news.metrics) if news.is_last else None,
        at_fault=news.ticket.at_fault,
    )


def describe_scores(news: News) -> list[TokenScores] | None:
    """The log-probabilities of news; None unless asked for."""
    return None if news.scores is None else [make_scores(place) for place in news.scores]


def make_scores(place: TokenLogprobs) -> TokenScores:
    """The log-probabilities at one place; the chosen token may be one of the most likely too, and stands first."""
    token_ids, logprobs = place.token_ids, place.logprobs
    chosen = token_ids[0]
    if chosen not in token_ids[1:]:
        return TokenScores(token_ids, logprobs)
    again = token_ids.index(chosen, 1)
    if again == 1:
        return TokenScores(token_ids[1:], logprobs[1:])
    return TokenScores(token_ids[:again] + token_ids[again + 1 :], logprobs[:again] + logprobs[again + 1 :])


def _forget_labels(place: Mapping[int, Logprob]) -> TokenScores:
    return TokenScores(list(place), [one.logprob for one in place.values()])
