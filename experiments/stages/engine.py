"""Every arm's engine serves every workload end to end, and every peer serves it in between."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from typing import Any

from experiments.arms import Arm
from experiments.peers import PEERS, PeerUnsupportedError
from experiments.rows import EngineRow, PeerRow, Status
from experiments.stages.context import Context, Step, one_line
from experiments.stages.serving import Served, equal_requests, figures, interleaved, spread
from experiments.timed_llm import TimedLLM, Timeline
from experiments.workloads import Request, requests_of
from tkernels import SelectionError
from tsched import SamplingParams
from tsched.outputs import RequestOutput

REPORTED_LOGPROBS = 5


@dataclass(frozen=True)
class Answer:
    """What an arm said to a workload, with log-probabilities: the parity stage's material."""

    arm: dict[str, str]
    settings: dict[str, Any]
    workload: str
    outputs: tuple[RequestOutput, ...]


def run(context: Context) -> list[Answer]:
    """Records an engine row per arm and workload, and a peer row per peer and workload; returns the arms' answers."""
    plan = context.plan
    if plan.model is None or not plan.experiment.workload:
        return []
    workloads = {w.name: requests_of(w, plan.model.config.vocab_size) for w in plan.experiment.workload}
    answers: list[Answer] = []
    peers_served = not plan.experiment.peers
    with context.step("engine", len(plan.arms) * len(workloads)) as step:
        for index, arm in enumerate(plan.arms):
            step.say(arm.title)
            refused = _refused(context, index, arm)
            if refused is not None:
                status, reason = refused
                _record_all(context, arm, status, reason, list(workloads), step)
                continue
            try:
                llm = _llm(context, arm)
            except Exception as error:
                failure: Status = "unsupported" if isinstance(error, SelectionError) else "failed"
                _record_all(context, arm, failure, one_line(error), list(workloads), step)
                continue
            for name, requests in workloads.items():
                peers = () if peers_served else plan.experiment.peers
                answers += _serve(context, llm, arm, name, requests, peers)
                step.advance("")
            peers_served = True  # peers know no arms: they are compared with the first that runs
    return answers


def _record_all(
    context: Context,
    arm: Arm,
    status: Status,
    reason: str,
    workloads: Sequence[str],
    step: Step,
) -> None:
    for name in workloads:
        common = context.common(arm=arm.labels, settings=arm.settings, workload=name)
        context.folder.record(EngineRow(**common, status=status, reason=reason))
        step.advance("")


def _refused(context: Context, index: int, arm: Arm) -> tuple[Status, str] | None:
    """Why an arm is not run: it is unsupported, or a kernel of it was wrong, which is not let loose on a real cache."""
    if index in context.plan.unsupported:
        return "unsupported", context.plan.unsupported[index]
    for op, pick in context.plan.running(arm).items():
        if (op, pick.label) in context.verdicts:
            status, reason = context.verdicts[(op, pick.label)]
            return status, f"not run, its {op}.{pick.label} is {status}: {reason}"
    return None


def _llm(context: Context, arm: Arm) -> TimedLLM:
    plan = context.plan
    assert plan.model is not None
    return TimedLLM(
        plan.model.directory(),
        kernels=arm.choices,
        dtype=plan.dtype,
        device=plan.device,
        ops=plan.ops,
        tuning=context.tuning,
        **arm.scheduler,
    )


def interpreted_ops(llm: TimedLLM) -> list[str]:
    """The ops of an engine that run in Triton's interpreter."""
    if llm.device.type != "cpu":
        return []
    return [op for op, kernel in llm.kernels.running.items() if kernel.variant.kind == "triton"]


def _serve(
    context: Context, llm: TimedLLM, arm: Arm, workload: str, requests: list[Request], peers: Sequence[str]
) -> list[Answer]:
    common = context.common(arm=llm.arm, settings=arm.settings, workload=workload)
    before = llm.stats()
    llm.reset_peak()
    try:
        timeline = llm.serve(requests, batching=arm.batching, salt=f"{workload}, answer", adapt=_with_logprobs)
        outputs, after = timeline.outputs, llm.stats()
        slow = interpreted_ops(llm)
        not_timed = f"{', '.join(slow)} interpreted on a CPU: not measured" if slow else None
        if slow:
            rounds = [_served(timeline, requests)]
        elif not peers:
            (rounds,) = interleaved(
                [_rounds_of(llm, arm, workload, requests)], context.plan.experiment.repeats, _nothing
            )
        else:
            rounds = _beside_peers(context, llm, arm, workload, requests, outputs, peers)
    except Exception as error:
        context.folder.record(EngineRow(**common, status="failed", reason=one_line(error)))
        return []
    failed = [output.error for output in outputs if output.error is not None]
    if len(failed) == len(outputs):
        context.folder.record(EngineRow(**common, status="failed", reason=f"every request failed: {failed[0]}"))
        return []
    texts = [output.outputs[0].text for output in outputs] if isinstance(requests[0].prompt, str) else None
    row = EngineRow(
        **common,
        status="ok",
        **figures(rounds, not_timed),
        texts=texts,
        peak_occupancy=after.peak_occupancy,
        last_page_waste=after.last_page_waste,
        steps=after.num_steps - before.num_steps,
        preemptions=after.num_preemptions - before.num_preemptions,
        peak_running=timeline.peak_running,
        hit_tokens=after.prefix_cache.hit_tokens - before.prefix_cache.hit_tokens,
        saved_bytes=after.saved_bytes - before.saved_bytes,
        evicted_blocks=after.prefix_cache.num_evictions - before.prefix_cache.num_evictions,
    )
    context.folder.record(row)
    return [Answer(llm.arm, arm.settings, workload, outputs)]


def _nothing() -> None:
    return None


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=REPORTED_LOGPROBS)


def _served(timeline: Timeline, requests: list[Request]) -> Served:
    outputs = timeline.outputs
    return Served(
        tokens=tuple(tuple(o.outputs[0].token_ids) if o.error is None else None for o in outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        seconds=timeline.seconds,
        moments=timeline.moments,
        late=frozenset(index for index, request in enumerate(requests) if request.after),
    )


def _rounds_of(llm: TimedLLM, arm: Arm, workload: str, requests: list[Request]) -> Callable[[], Served]:
    """Serves a timed round, without log-probabilities, which cost a softmax over the vocabulary. No round finds in the
    prefix cache what another left there.
    """
    salts = (f"{workload}, round {number}" for number in count())
    return lambda: _served(llm.serve(requests, batching=arm.batching, salt=next(salts)), requests)


def _beside_peers(
    context: Context,
    llm: TimedLLM,
    arm: Arm,
    workload: str,
    requests: list[Request],
    outputs: Sequence[RequestOutput],
    peers: Sequence[str],
) -> list[Served]:
    """The arm's rounds, with each peer's in between and on record."""
    plan = context.plan
    assert plan.model is not None
    by_ids = [replace(r, prompt=o.prompt_token_ids) for o, r in zip(outputs, requests, strict=True)]
    common = context.common(arm=llm.arm, settings=arm.settings, workload=workload)
    servers: dict[str, Any] = {}
    with context.step(
        f"peers {workload}".strip(), len(peers) + (1 + len(peers)) * (plan.experiment.repeats + 1)
    ) as step:
        for name in peers:
            step.say(f"{name}: finding its best settings")
            try:
                make = import_module(PEERS[name]).make_peer
                servers[name] = make(name, plan.model.directory(), by_ids, plan.device, plan.dtype)
            except PeerUnsupportedError as error:
                context.folder.record(PeerRow(**common, peer=name, status="unsupported", reason=str(error)))
            except Exception as error:
                context.folder.record(PeerRow(**common, peer=name, status="failed", reason=one_line(error)))
            step.advance("")
        step.say("interleaved rounds")
        everyone = [_rounds_of(llm, arm, workload, requests), *servers.values()]
        mine, *theirs = interleaved(everyone, plan.experiment.repeats, lambda: step.advance("interleaved rounds"))
    for (name, server), rounds in zip(servers.items(), theirs, strict=True):
        speedups = [a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, rounds, strict=True)]
        equal = equal_requests(mine[-1].tokens, rounds[-1].tokens)
        context.folder.record(
            PeerRow(
                **common,
                status="ok",
                peer=name,
                peer_settings=dict(server.settings),
                **figures(rounds),
                speedup=statistics.median(speedups),
                speedup_iqr=spread(speedups),
                speedups=speedups,
                tokens_equal=equal == len(requests),
                requests_equal=equal,
            )
        )
    return mine
