"""Every arm's engine serves every workload end to end; the timed rounds of arms and peers take turns."""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from typing import Any

import torch

from experiments.arms import Arm, ServedWorkload
from experiments.peers import PEERS, PeerUnsupportedError
from experiments.rows import EngineRow, PeerRow, Status
from experiments.schema import Batching
from experiments.stages.context import Context, Step, one_line
from experiments.stages.memory import Seat, groups_of
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
    workload: ServedWorkload
    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True)
class _Refusal:
    """Why an arm serves nothing."""

    status: Status
    reason: str


@dataclass(frozen=True, eq=False)
class _Side:
    """An arm and its engine, as long as its group is in memory."""

    arm: Arm
    engine: TimedLLM | _Refusal

    @property
    def labels(self) -> dict[str, str]:
        """op -> variant: all that serve it, or where there is no engine those that the arm names."""
        return self.arm.labels if isinstance(self.engine, _Refusal) else self.engine.arm


@dataclass(frozen=True)
class _Workload:
    served: ServedWorkload
    requests: list[Request]

    @property
    def name(self) -> str:
        return self.served.name


@dataclass(frozen=True)
class _Told:
    """An arm's answer to a workload, with the facts of that run. not_timed: why it gets no timed rounds, or None."""

    timeline: Timeline
    facts: Mapping[str, Any]
    not_timed: str | None


def run(context: Context) -> list[Answer]:
    """Records an engine row per arm and workload, and a peer row per peer and workload; returns the arms' answers."""
    plan = context.plan
    if plan.model is None or not plan.experiment.workload:
        return []
    served = [one for arm in plan.arms for one in arm.workloads]
    distinct = [one for index, one in enumerate(served) if one not in served[:index]]
    workloads = [_Workload(one, requests_of(one.workload, plan.model.config.vocab_size)) for one in distinct]
    answers: list[Answer] = []
    peers: Sequence[str] = plan.experiment.peers
    rounds = 1 + plan.experiment.repeats
    total = len(workloads) * (len(plan.arms) * (1 + rounds) + len(peers) * (1 + rounds))
    _free(plan.device)  # what checking and timing left counts as taken
    with context.step("engine", total) as step:
        for number, group in enumerate(groups_of(plan, enumerate(plan.arms)), 1):
            sides = [_Side(seat.arm, _engine(context, seat, step)) for seat in group]
            for workload in workloads:
                mine = [side for side in sides if workload.served in side.arm.workloads]
                if mine:
                    answers += _Turns(context, number, workload, mine, step).serve(peers)
            if not all(isinstance(side.engine, _Refusal) for side in sides):
                peers = ()  # they know no arms: they are compared with the first that runs
            sides.clear()
            _free(plan.device)
    return answers


def _free(device: torch.device) -> None:
    """Give back memory that nobody holds any more, for the engines that come."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _engine(context: Context, seat: Seat, step: Step) -> TimedLLM | _Refusal:
    """The engine of an arm, or why it has none: it is unsupported, cannot be made, or a kernel of it was wrong, and is
    not let loose on a real cache.
    """
    step.say(seat.arm.title)
    plan = context.plan
    assert plan.model is not None
    if seat.index in plan.unsupported:
        return _Refusal("unsupported", plan.unsupported[seat.index])
    for op, pick in plan.running(seat.arm).items():
        if (op, pick.label) in context.verdicts:
            status, reason = context.verdicts[(op, pick.label)]
            return _Refusal(status, f"not run, its {op}.{pick.label} is {status}: {reason}")
    try:
        return TimedLLM(
            plan.model.directory(),
            kernels=seat.arm.choices,
            dtype=plan.dtype,
            device=plan.device,
            ops=plan.ops,
            tuning=context.tuning,
            **seat.options,
        )
    except Exception as error:
        return _Refusal("unsupported" if isinstance(error, SelectionError) else "failed", one_line(error))


def interpreted_ops(llm: TimedLLM) -> list[str]:
    """The ops of an engine that run in Triton's interpreter."""
    if llm.device.type != "cpu":
        return []
    return [op for op, kernel in llm.kernels.running.items() if kernel.variant.kind == "triton"]


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=REPORTED_LOGPROBS)


def served_once(llm: TimedLLM, requests: Sequence[Request], batching: Batching, salt: str) -> Served:
    """A timed round of `requests`; prefixes are shared with rounds of the same salt only."""
    return _served(llm.serve(requests, batching=batching, salt=salt), requests)


def _served(timeline: Timeline, requests: Sequence[Request]) -> Served:
    outputs = timeline.outputs
    late = [request.after > 0 for request in requests for _ in range(request.params.n)]
    return Served(
        tokens=tuple(tuple(c.token_ids) if o.error is None else None for o in outputs for c in o.outputs),
        prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        seconds=timeline.seconds,
        moments=timeline.moments,
        late=frozenset(index for index, comes_late in enumerate(late) if comes_late),
    )


@dataclass(frozen=True)
class _Turns:
    """The arms of a group at one workload."""

    context: Context
    group: int
    workload: _Workload
    sides: Sequence[_Side]
    step: Step

    def serve(self, peers: Sequence[str]) -> Iterator[Answer]:
        """Have every arm answer, then time those that can be, and the peers, in turns; records the rows."""
        told: dict[_Side, _Told | _Refusal] = {}
        for side in self.sides:
            self.step.say(side.arm.title)
            told[side] = self._answer(side)
            self.step.advance("")
        timed = [side for side, answer in told.items() if isinstance(answer, _Told) and answer.not_timed is None]
        rounds_each = 1 + self.context.plan.experiment.repeats
        self.step.advance("", (len(told) - len(timed)) * rounds_each)
        servers = self._peer_servers(timed[0], told, peers) if timed else {}
        self.step.advance("", (len(peers) - len(servers)) * rounds_each)
        everyone = [*(self._rounds_of(side) for side in timed), *servers.values()]
        rounds = interleaved(everyone, rounds_each - 1, lambda: self.step.advance("rounds in turns"))
        mine = dict(zip(timed, rounds, strict=False))
        for side, answer in told.items():
            if isinstance(answer, _Told):
                answer = self._record(side, answer, mine.get(side))
            if isinstance(answer, _Refusal):
                row = EngineRow(**self._common(side), status=answer.status, reason=answer.reason)
                self.context.folder.record(row)
            else:
                settings = {**side.arm.settings, **self.workload.served.settings}
                yield Answer(side.labels, settings, self.workload.served, answer.timeline.outputs)
        for (name, server), theirs in zip(servers.items(), rounds[len(timed) :], strict=True):
            self._record_peer(timed[0], mine[timed[0]], name, server, theirs)

    def _common(self, side: _Side) -> dict[str, Any]:
        settings = {**side.arm.settings, **self.workload.served.settings}
        return self.context.common(arm=side.labels, settings=settings, workload=self.workload.name)

    def _answer(self, side: _Side) -> _Told | _Refusal:
        llm = side.engine
        if isinstance(llm, _Refusal):
            return llm
        before = llm.stats()
        llm.reset_peak()
        try:
            salt = f"{self.workload.served.title}, answer"
            timeline = llm.serve(self.workload.requests, batching=side.arm.batching, salt=salt, adapt=_with_logprobs)
        except Exception as error:
            return _Refusal("failed", one_line(error))
        failed = [output.error for output in timeline.outputs if output.error is not None]
        if len(failed) == len(timeline.outputs):
            return _Refusal("failed", f"every request failed: {failed[0]}")
        after = llm.stats()
        is_text = isinstance(self.workload.requests[0].prompt, str)
        facts = {
            "group": self.group,
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
        slow = interpreted_ops(llm)
        return _Told(timeline, facts, f"{', '.join(slow)} interpreted on a CPU: not measured" if slow else None)

    def _rounds_of(self, side: _Side) -> Callable[[], Served]:
        """Serves a timed round, without log-probabilities, which cost a softmax over the vocabulary. No round finds in
        the prefix cache what another left there.
        """
        llm, requests, batching = side.engine, self.workload.requests, side.arm.batching
        assert not isinstance(llm, _Refusal)
        salts = (f"{self.workload.served.title}, round {number}" for number in count())
        return lambda: served_once(llm, requests, batching, next(salts))

    def _record(self, side: _Side, told: _Told, rounds: list[Served] | Exception | None) -> _Told | _Refusal:
        """Record the arm's figures; what it raised in a round is why it has none."""
        if isinstance(rounds, Exception):
            return _Refusal("failed", one_line(rounds))
        served = rounds or [_served(told.timeline, self.workload.requests)]
        row = EngineRow(**self._common(side), status="ok", **figures(served, told.not_timed), **told.facts)
        self.context.folder.record(row)
        return told

    def _peer_servers(
        self, side: _Side, told: Mapping[_Side, _Told | _Refusal], peers: Sequence[str]
    ) -> dict[str, Any]:
        """name -> a peer that serves the token ids of the workload; those that cannot are on record."""
        plan, servers = self.context.plan, {}
        first = told[side]
        assert plan.model is not None
        assert isinstance(first, _Told)
        outputs = zip(first.timeline.outputs, self.workload.requests, strict=True)
        by_ids = [replace(request, prompt=output.prompt_token_ids) for output, request in outputs]
        common = self._common(side)
        for name in peers:
            self.step.say(f"{name}: finding its best settings")
            try:
                make = import_module(PEERS[name]).make_peer
                servers[name] = make(name, plan.model.directory(), by_ids, plan.device, plan.dtype)
            except PeerUnsupportedError as error:
                self.context.folder.record(PeerRow(**common, peer=name, status="unsupported", reason=str(error)))
            except Exception as error:
                self.context.folder.record(PeerRow(**common, peer=name, status="failed", reason=one_line(error)))
            self.step.advance("")
        return servers

    def _record_peer(
        self, side: _Side, mine: list[Served] | Exception, name: str, server: Any, theirs: list[Served] | Exception
    ) -> None:
        common = {**self._common(side), "peer": name}
        if isinstance(theirs, Exception) or isinstance(mine, Exception):
            error = theirs if isinstance(theirs, Exception) else mine
            about = "" if error is theirs else "the arm that it is compared with: "
            assert isinstance(error, Exception)
            row = PeerRow(**common, status="failed", reason=f"{about}{one_line(error)}")
        else:
            speedups = [a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, theirs, strict=True)]
            equal = equal_requests(mine[-1].tokens, theirs[-1].tokens)
            row = PeerRow(
                **common,
                status="ok",
                peer_settings=dict(server.settings),
                **figures(theirs),
                speedup=statistics.median(speedups),
                speedup_iqr=spread(speedups),
                speedups=speedups,
                tokens_equal=equal == len(mine[-1].tokens),
                requests_equal=equal,
            )
        self.context.folder.record(row)
