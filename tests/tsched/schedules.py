"""Random schedules: requests that arrive over time, share prefixes, fork and are aborted, in a pool that is too small.

Whatever happens around it, each request must get the tokens that it gets alone. A schedule is a function of its seed:

    python -m tests.tsched.schedules --count 2000 --model hash
    python -m tests.tsched.schedules --model float64 --seed 17    # one of them again, described
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from tests.tsched.random_schedules import Event, Request, Schedule, draw_schedule
from tsched.sampling_params import SamplingParams
from tsched.scheduler import Scheduler
from tsched.sequence import Sequence

SERVERS = {  # loaded by name: what the others serve needs torch
    "hash": ("tests.tsched.hash_server", "HashServer"),
    "float64": ("tests.tsched.engine_server", "EngineServer"),
    "rowwise": ("tests.tsched.engine_server", "RowwiseServer"),
}


class Server(Protocol):
    """What serves the requests: a scheduler with a device, real or not."""

    scheduler: Scheduler

    def add(self, number: int, request: Request) -> Sequence: ...

    def fork(self, parent: int, number: int, params: SamplingParams, num_tokens: int) -> Sequence: ...

    def abort(self, number: int) -> None: ...

    def step(self) -> None: ...

    def output_of(self, sequence: Sequence) -> list[Any]: ...

    def alone(self, request: Request, number: int) -> tuple[list[Any], str]:
        """The output that the request gets with nobody else around, and why it ends."""


@dataclass
class Run:
    """What became of a schedule. `happened` counts what really took place."""

    schedule: Schedule
    sequences: dict[int, Sequence] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0


def serve(schedule: Schedule, make_server: Callable[[Schedule], Server]) -> Run:
    """Carry the schedule out, checking every plan, every output, how long each request took, and what is left."""
    run = Run(schedule)
    server = make_server(schedule)
    scheduler = server.scheduler
    arrivals = sorted(enumerate(schedule.requests), key=lambda item: item[1].arrival)
    events = list(schedule.events)
    limit = max((r.arrival for r in schedule.requests), default=0) + _work(schedule.requests) * 2
    while arrivals or scheduler.has_unfinished:
        while arrivals and arrivals[0][1].arrival <= run.num_steps:
            number, request = arrivals.pop(0)
            _note_arrival(run, number, request, server.add(number, request))
        while events and events[0].step <= run.num_steps:
            _carry_out(run, server, events.pop(0))
        _step(run, server)
        for number, sequence in run.sequences.items():
            if sequence.finish_reason is not None:
                run.ended.setdefault(number, run.num_steps)
        assert run.num_steps <= limit, (
            f"{scheduler.num_running} run and {scheduler.num_waiting} wait after {limit} steps"
        )
    server.step()  # takes in the outcome of plans under way
    _count_what_happened(run, scheduler)
    check_outputs(run, server)
    check_waiting_times(run)
    check_nothing_is_left(scheduler)
    return run


def _step(run: Run, server: Server) -> None:
    """One step, after which nobody has given way to one behind him."""
    running = {n: s.num_preemptions for n, s in run.sequences.items() if s.row >= 0}
    server.step()
    run.num_steps += 1
    sequences = run.sequences
    gave_way = [number for number, before in running.items() if sequences[number].num_preemptions > before]
    for number in gave_way:
        for other in running:
            went_on = sequences[other].row >= 0 and other not in gave_way
            assert not (went_on and is_behind(run, other, number)), f"{number} gave way to {other}, which is behind it"


def _note_arrival(run: Run, number: int, request: Request, sequence: Sequence) -> None:
    run.sequences[number], run.requests[number], run.began[number] = sequence, request, run.num_steps


def state_of(scheduler: Scheduler, sequence: Sequence) -> str:
    if sequence.row < 0:
        return "preempted" if sequence.num_preemptions else "new"
    return "prefill" if scheduler.table.computed[sequence.row] < scheduler.table.known[sequence.row] - 1 else "decode"


def _carry_out(run: Run, server: Server, event: Event) -> None:
    scheduler = server.scheduler
    present: dict[str, list[int]] = {}
    for number, sequence in run.sequences.items():
        if sequence.finish_reason is None:
            present.setdefault(state_of(scheduler, sequence), []).append(number)
    if not present:
        return
    place = event.pick * len(present)
    state = sorted(present)[int(place)]
    number = present[state][int((place - int(place)) * len(present[state]))]
    run.happened[f"abort: {state}"] += 1
    server.abort(number)


def _work(requests: Any) -> int:
    """Steps in which each request, alone, is surely done, with a step's slack at either end."""
    return sum(request.max_length + 4 for request in requests)


def _count_what_happened(run: Run, scheduler: Scheduler) -> None:
    happened, counters = run.happened, scheduler.counters
    happened["requests"] += len(run.requests)
    happened["steps"] += run.num_steps
    happened["preemptions"] += counters.num_preemptions
    happened["tokens"] += counters.num_output_tokens
    happened[f"cache: {run.schedule.options['prefix_cache']}"] += 1
    happened[f"lag: {run.schedule.lag}"] += 1
    for sequence in run.sequences.values():
        happened[f"end: {sequence.finish_reason}"] += 1


def check_outputs(run: Run, server: Server) -> None:
    for number, request in run.requests.items():
        sequence = run.sequences[number]
        expected, reason = server.alone(request, number)
        got = server.output_of(sequence)
        if sequence.finish_reason == "abort":
            expected, reason = expected[: len(got)], "abort"
        assert (got, sequence.finish_reason) == (expected, reason), (
            f"request {number} got {got} ({sequence.finish_reason}), alone it gets {expected} ({reason})"
        )


def check_waiting_times(run: Run) -> None:
    """No request waits for one that came after it.

    From its arrival it is done within twice the steps that those not behind it take one after the other: once for
    their tokens, and once because what gives way to them is computed again.
    """
    for number, ended in run.ended.items():
        began = run.began[number]
        ahead = [r for other, r in run.requests.items() if not is_behind(run, other, number)]
        bound = 2 * _work(ahead)
        assert ended - began <= bound, f"request {number} took {ended - began} steps, at most {bound} are needed"


def is_behind(run: Run, other: int, number: int) -> bool:
    return run.sequences[other].arrival > run.sequences[number].arrival


def check_nothing_is_left(scheduler: Scheduler) -> None:
    """No block, row or sequence outlives its request."""
    pool, table = scheduler.pool, scheduler.table
    assert pool.num_referenced == 0, f"{pool.num_referenced} blocks are left behind"
    assert pool.num_free + pool.num_cached == pool.num_blocks
    assert table.num_free_rows == table.num_rows, "a row is left behind"
    assert all(sequence is None for sequence in table.sequences)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished) == (0, 0, False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tsched.schedules", description=__doc__)
    parser.add_argument("--model", choices=sorted(SERVERS), default="hash")
    parser.add_argument("--count", type=int, default=100, help="schedules of the seeds from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this schedule alone, described")
    arguments = parser.parse_args()
    make_server = server_factory(arguments.model)
    if arguments.seed is not None:
        schedule = draw_schedule(arguments.seed)
        print(describe(schedule))
        print(dict(sorted(serve(schedule, make_server).happened.items())))
        return
    began = time.perf_counter()
    total: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):
        total += serve_or_say_how_to_replay(draw_schedule(seed), make_server, arguments.model).happened
        done = seed - arguments.first + 1
        if done % 100 == 0 or done == arguments.count:
            print(f"{done} schedules, {time.perf_counter() - began:.0f} s", flush=True)
    for what in sorted(total):
        print(f"{what:24} {total[what]:>9,}")


def serve_or_say_how_to_replay(schedule: Schedule, make_server: Callable[[Schedule], Server], model: str) -> Run:
    """`serve`; where it fails, the error carries the command that makes it fail again."""
    try:
        return serve(schedule, make_server)
    except BaseException as error:
        error.add_note(f"replay: python -m tests.tsched.schedules --model {model} --seed {schedule.seed}")
        raise


def server_factory(model: str) -> Callable[[Schedule], Server]:
    module, name = SERVERS[model]
    factory: Callable[[Schedule], Server] = getattr(import_module(module), name)
    return factory


def describe(schedule: Schedule) -> str:
    lines = [f"schedule {schedule.seed}: lag {schedule.lag}, pressure {schedule.pressure:.0%}, {schedule.options}"]
    lines += [f"  request {number}: {request}" for number, request in enumerate(schedule.requests)]
    lines += [f"  {event}" for event in schedule.events]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
