"""An arm's engine serves a workload end to end: once for its answers, then in timed rounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from experiments.runs.rows import Row
from experiments.schema import Batching
from experiments.serving.requests import Request
from experiments.serving.rounds import Served, interleaved
from experiments.stages.context import Context, one_line, served_fields
from experiments.stages.served_figures import figures, raw_rounds
from experiments.stages.timed_llm import TimedLLM, Timeline
from experiments.stages.yardstick import Yardstick
from tkernels import SelectionError
from tsched import SamplingParams
from tsched.requests.outputs import RequestOutput

REPORTED_LOGPROBS = 5

_YARDSTICK_SAMPLES = 100  # 10 ms after each round


def run(context: Context) -> None:
    """Records one row, and keeps the rounds' raw moments and, of the first replicate, the answers."""
    plan, arm, report = context.plan, context.arm, context.report
    assert plan.model is not None
    served = context.served
    common = context.common(**served_fields(plan, arm, served))
    report.say("loading the engine")
    try:
        llm = TimedLLM(plan.model.directory(), tuning=context.tuning, **plan.engine_options(arm))
        requests = context.requests()
        report.say("answers")
        timeline, facts = _answer(llm, requests, arm.batching, served.title)
        slow = interpreted_ops(llm)
        not_timed = f"{', '.join(slow)} interpreted on a CPU: not measured" if slow else None
        rounds: list[Served] | Exception = [_served(timeline, requests)]
        yardstick = Yardstick() if not_timed is None and plan.device.type == "cpu" else None
        if not_timed is None:
            serve = rounds_of(llm, requests, arm.batching, served.title)
            over = counted(report.say, 1 + plan.experiment.repeats, yardstick)
            rounds = interleaved([serve], plan.experiment.repeats, over)[0]
        if isinstance(rounds, Exception):
            raise rounds
    except SelectionError as error:
        context.record(Row(stage="engine", **common, status="unsupported", reason=one_line(error)))
    except _NothingServedError as error:
        context.record(Row(stage="engine", **common, status="failed", reason=str(error)))
    except Exception as error:
        context.record(Row(stage="engine", **common, status="failed", reason=one_line(error)))
    else:
        samples: dict[str, Any] = {"rounds": raw_rounds(rounds) if not_timed is None else []}
        if context.task.replicate == 0:
            samples["requests"] = [_as_samples(output) for output in timeline.outputs]
        report.keep(samples)
        taken = yardstick.median_us if yardstick is not None else None
        context.record(
            Row(stage="engine", **common, status="ok", yardstick_us=taken, **figures(rounds, not_timed), **facts)
        )


class _NothingServedError(RuntimeError):
    """Every request failed."""


def interpreted_ops(llm: TimedLLM) -> list[str]:
    """The ops of an engine that run in Triton's interpreter."""
    if llm.device.type != "cpu":
        return []
    return [op for op, kernel in llm.kernels.running.items() if kernel.variant.kind == "triton"]


def counted(say: Callable[[str], None], total: int, yardstick: Yardstick | None) -> Callable[[], None]:
    """Says how many rounds are over each time that it is called, and takes the yardstick's samples between two."""
    done = count(1)

    def over() -> None:
        if yardstick is not None:
            for _ in range(_YARDSTICK_SAMPLES):
                yardstick()
        say(f"{next(done)} of {total} rounds")

    return over


def rounds_of(llm: TimedLLM, requests: Sequence[Request], batching: Batching, name: str) -> Callable[[], Served]:
    """Serves a timed round, without log-probabilities, which cost a softmax over the vocabulary. No round finds in the
    prefix cache what another left there.
    """
    salts = (f"{name}, round {number}" for number in count())
    return lambda: _served(llm.serve(requests, batching=batching, salt=next(salts)), requests)


def _answer(
    llm: TimedLLM, requests: Sequence[Request], batching: Batching, name: str
) -> tuple[Timeline, dict[str, Any]]:
    """What the engine says to the workload, with log-probabilities, and the facts of that run."""
    before = llm.stats()
    llm.reset_peak()
    timeline = llm.serve(requests, batching=batching, salt=f"{name}, answer", adapt=_with_logprobs)
    failed = [output.error for output in timeline.outputs if output.error is not None]
    if len(failed) == len(timeline.outputs):
        raise _NothingServedError(f"every request failed: {failed[0]}")
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


def _served(timeline: Timeline, requests: Sequence[Request]) -> Served:
    outputs = timeline.outputs
    late = [request.after > 0 for request in requests for _ in range(request.params.n)]
    return Served(
        tokens=tuple(tuple(c.token_ids) if o.error is None else None for o in outputs for c in o.outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        seconds=timeline.seconds,
        moments=timeline.moments,
        late=frozenset(index for index, comes_late in enumerate(late) if comes_late),
        error=next((output.error for output in outputs if output.error is not None), None),
    )


def _as_samples(output: RequestOutput) -> dict[str, Any]:
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
