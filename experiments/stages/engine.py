"""An arm's engine serves a workload end to end: once for its answers, then in timed rounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from experiments.schema import Batching
from experiments.serving.requests import Request
from experiments.serving.rounds import Served
from experiments.stages.context import Context, describe_error
from experiments.stages.served_figures import count_served, no_times, raw_rounds, summarize_times, time_rounds
from experiments.stages.timed_llm import TimedLLM, Timeline
from tkernels import SelectionError
from tkernels.errors import TKernelsError
from tsched import SamplingParams
from tsched.requests.outputs import RequestOutput

REPORTED_LOGPROBS = 5


def run(context: Context) -> None:
    """Records one row, and keeps the rounds' raw moments and, of the first replicate, the answers."""
    context.say("loading the engine")
    try:
        llm = TimedLLM(context.directory, tuning=context.tuning, **context.plan.engine_options(context.arm))
        columns, samples = _serve(context, llm)
    except SelectionError as error:
        context.record("unsupported", reason=describe_error(error))
    except _NothingServedError as error:
        context.record("failed", reason=str(error))
    except Exception as error:
        context.record("failed", reason=describe_error(error))
    else:
        context.keep(samples)
        context.record(**columns)


class _NothingServedError(TKernelsError, RuntimeError):
    """Every request failed."""


def _serve(context: Context, llm: TimedLLM) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row's columns, and the task's samples."""
    requests, batching, name = context.requests(), context.arm.batching, context.served.title
    context.say("answers")
    answer, facts = _answer(llm, requests, batching, name)
    if slow := interpreted_ops(llm):
        raw, columns = [], count_served(answer) | no_times(f"{', '.join(slow)} interpreted on a CPU: not measured")
    else:
        rounds, yardstick_us = time_rounds(context, rounds_of(llm, requests, batching, name))
        raw, columns = raw_rounds(rounds), count_served(rounds[-1]) | summarize_times(rounds)
        columns["yardstick_us"] = yardstick_us
    samples: dict[str, Any] = {"rounds": raw}
    if context.task.replicate == 0:
        samples["requests"] = [_sample_answer(output) for output in answer.outputs]
    return columns | facts, samples


def interpreted_ops(llm: TimedLLM) -> list[str]:
    """The ops of an engine that run in Triton's interpreter."""
    if llm.device.type != "cpu":
        return []
    return [op for op, kernel in llm.kernels.running.items() if kernel.variant.kind == "triton"]


def rounds_of(llm: TimedLLM, requests: Sequence[Request], batching: Batching, name: str) -> Callable[[], Served]:
    """Serves a timed round, without log-probabilities, which cost a softmax over the vocabulary. No round finds in the
    prefix cache what another left there.
    """
    salts = (f"{name}, round {number}" for number in count())
    return lambda: llm.serve(requests, batching=batching, salt=next(salts))


def _answer(
    llm: TimedLLM, requests: Sequence[Request], batching: Batching, name: str
) -> tuple[Timeline, dict[str, Any]]:
    """What the engine says to the workload, with log-probabilities, and the facts of that run."""
    before = llm.stats()
    llm.reset_peak()
    timeline = llm.serve(requests, batching=batching, salt=f"{name}, answer", adapt=_with_logprobs)
    if all(output.error is not None for output in timeline.outputs):
        raise _NothingServedError(f"every request failed: {timeline.error}")
    after = llm.stats()
    is_text = isinstance(requests[0].prompt, str)
    return timeline, {
        "texts": [output.outputs[0].text for output in timeline.outputs] if is_text else None,
        "peak_occupancy": after.peak_occupancy,
        "last_page_waste": after.last_page_waste,
        "steps": after.num_steps - before.num_steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
        "peak_running": timeline.peak_running,
        "hit_tokens": after.prefix_cache.hit_tokens - before.prefix_cache.hit_tokens,
        "saved_bytes": after.saved_bytes - before.saved_bytes,
        "evicted_blocks": after.prefix_cache.num_evictions - before.prefix_cache.num_evictions,
        "weight_bytes": llm.weight_bytes,
        "prepare_s": llm.prepare_report.seconds,
    }


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=REPORTED_LOGPROBS)


def _sample_answer(output: RequestOutput) -> dict[str, Any]:
    """A request's answer, for the parity of arms: the tokens and log-probabilities of each completion."""
    return {
        "prompt": output.prompt_token_ids,
        "error": output.error,
        "completions": [
            {
                "tokens": completion.token_ids,
                "logprobs": [[[token, p.logprob] for token, p in place.items()] for place in completion.logprobs or ()],
            }
            for completion in output.outputs
        ],
    }
