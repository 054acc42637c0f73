"""Random schedules: requests that arrive over time, share prefixes, fork and are aborted, in a pool that is too small.

Whatever happens around it, each request must get the tokens that it gets alone. A schedule is a function of its seed:

    python -m tests.tsched.schedules --count 2000 --model hash
    python -m tests.tsched.schedules --model float64 --seed 17    # one of them again, described
    python -m tests.tsched.schedules --model float64 --architecture LlamaForCausalLM
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from tests.tsched.random_schedules import Event, Request, Schedule, draw_schedule
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.policies.priority import AGEING
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence

SERVERS = {  # loaded by name: what the others serve needs torch
    "hash": ("tests.tsched.hash_server", "HashServer"),
    "state": ("tests.tsched.state_server", "StateServer"),
    "window": ("tests.tsched.window_server", "WindowServer"),
    "float64": ("tests.tsched.engine_server", "EngineServer"),
    "shared": ("tests.tsched.engine_server", "SharingServer"),
    "rowwise": ("tests.tsched.engine_server", "RowwiseServer"),
    "windowed": ("tests.tsched.engine_server", "WindowedServer"),
}


class Server(Protocol):
    """What serves the requests: a scheduler with a device, real or not."""

    scheduler: Scheduler

    def add(self, numbers: list[int], request: Request) -> list[Sequence]:
        """Queue the request's members under these numbers."""

    def fork(self, parent: int, number: int, params: SamplingParams, num_tokens: int) -> Sequence: ...

    def abort(self, number: int) -> None: ...

    def step(self) -> None: ...

    def output_of(self, sequence: Sequence) -> list[Any]: ...

    def alone(self, request: Request, number: int) -> tuple[list[Any], str]:
        """The output that the request gets with nobody else around, and why it ends."""

    @property
    def is_idle(self) -> bool:
        """Whether it remembers no request and waits for no step."""


@dataclass
class Run:
    """What became of a schedule. `happened` counts what really took place.

    Whatever is served has a number: the requests' members in the order of the schedule, then forks as they come.
    """

    schedule: Schedule
    sequences: dict[int, Sequence] = field(default_factory=dict)
    present: dict[int, Sequence] = field(default_factory=dict)  # those of them that have not finished
    requests: dict[int, Request] = field(default_factory=dict)
    ranks: dict[int, tuple[int, int]] = field(default_factory=dict)  # lower goes first, as the policy promises
    followers: set[int] = field(default_factory=set)  # they wait for their group's prompt, not in the queue
    began: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    num_arrivals: int = 0
    num_forks: int = 0

    @property
    def num_planned(self) -> int:
        return sum(len(request.members) for request in self.schedule.requests)

    def note_arrival(self, number: int, request: Request, sequence: Sequence, key: int) -> None:
        self.sequences[number] = self.present[number] = sequence
        self.requests[number], self.began[number] = request, self.num_steps
        self.ranks[number] = (key, len(self.ranks))

    def is_behind(self, number: int, other: int) -> bool:
        return self.ranks[number] > self.ranks[other]


def serve(schedule: Schedule, make_server: Callable[[Schedule], Server]) -> Run:
    """Carry the schedule out, checking every plan, every output, how long each request took, and what is left."""
    run = Run(schedule)
    server = make_server(schedule)
    scheduler = server.scheduler
    arrivals = deque(sorted(_numbered(schedule.requests), key=lambda item: item[1].arrival))
    events = deque(schedule.events)
    spread = max(request.arrival for request in schedule.requests)
    while arrivals or scheduler.has_unfinished:
        while arrivals and arrivals[0][1].arrival <= run.num_steps:
            numbers, request = arrivals.popleft()
            key = run.num_arrivals + (AGEING * request.priority if schedule.options.get("order") == "priority" else 0)
            run.num_arrivals += 1
            run.followers.update(numbers[1:])
            for new in zip(numbers, request.members, server.add(numbers, request), strict=True):
                run.note_arrival(*new, key)
        while events and events[0].step <= run.num_steps:
            _carry_out(run, server, events.popleft())
        _step(run, server)
        limit = spread + 2 * _work(run.requests.values())
        assert run.num_steps <= limit, f"after {limit} steps {scheduler.num_running} run, {scheduler.num_waiting} wait"
    server.step()  # takes in the outcome of plans under way
    _count_what_happened(run, scheduler)
    check_outputs(run, server)
    check_waiting_times(run)
    check_nothing_is_left(scheduler)
    assert server.is_idle
    return run


def _step(run: Run, server: Server) -> None:
    """One step, with the promises of the order: the last gives way first; who was swapped out goes before newcomers;
    of the others the first in the order goes first.
    """
    sequences = run.present
    before = {number: s.num_preemptions for number, s in sequences.items() if s.row >= 0}
    waiting = sequences.keys() - before.keys()
    swapped = {number for number in waiting if sequences[number].host_blocks.size}
    server.step()
    run.num_steps += 1
    gave_way = {number for number, times in before.items() if sequences[number].num_preemptions > times}
    for number in gave_way:
        ahead = [n for n in before if n not in gave_way and sequences[n].row >= 0 and run.is_behind(n, number)]
        assert not ahead, f"{number} gave way to {ahead}, which are behind it"
    entered = {n for n in waiting if sequences[n].row >= 0 or sequences[n].finish_reason is not None}
    left_out = waiting - entered - run.followers
    assert not (left_out & swapped and entered - swapped), f"{entered} went before {swapped}, who were swapped out"
    for number in entered - swapped:
        ahead = [n for n in left_out - swapped if run.is_behind(number, n)]
        assert not ahead, f"{number} was admitted before {ahead}, which are ahead of it"
    for number in [number for number, sequence in sequences.items() if sequence.finish_reason is not None]:
        run.ended[number] = run.num_steps
        del sequences[number]


def _numbered(requests: Iterable[Request]) -> Iterator[tuple[list[int], Request]]:
    first = 0
    for request in requests:
        yield list(range(first, first + len(request.members))), request
        first += len(request.members)


def state_of(scheduler: Scheduler, sequence: Sequence) -> str:
    if sequence.row >= 0:
        known = int(scheduler.table.known[sequence.row])
        return "prefill" if scheduler.table.computed[sequence.row] < known - 1 else "decode"
    if sequence.host_blocks.size:
        return "swapped"
    if sequence.blocks.size:
        return "forked"
    return "preempted" if sequence.num_preemptions else "new"


def _carry_out(run: Run, server: Server, event: Event) -> None:
    scheduler = server.scheduler
    present: dict[str, list[int]] = {}
    for number, sequence in run.present.items():
        present.setdefault(state_of(scheduler, sequence), []).append(number)
    if not present:
        return
    place = event.pick * len(present)
    state = sorted(present)[int(place)]
    number = present[state][int((place - int(place)) * len(present[state]))]
    if event.fork is None:
        run.happened[f"abort: {state}"] += 1
        server.abort(number)
        del run.present[number]
    else:
        _fork(run, server, number, event.fork, event.kept)
        run.happened[f"fork: {state}"] += 1


def _fork(run: Run, server: Server, parent: int, params: SamplingParams, kept: float) -> None:
    request, output = run.requests[parent], server.scheduler.output_of(run.sequences[parent])
    tokens = (*request.prompt, *output)
    count = max(1, round(kept * len(tokens)))
    child = run.num_planned + run.num_forks
    run.num_forks += 1
    try:
        sequence = server.fork(parent, child, params, count)
    except RefusedError:  # it would be longer than the pool, or has its max_tokens already
        run.happened["forks refused"] += 1
        return
    prompt = tokens[: min(count, len(request.prompt))]
    forked = Request(prompt, params, request.salt, given=tokens[len(prompt) : count])
    run.note_arrival(child, forked, sequence, run.ranks[parent][0])


def _work(requests: Any) -> int:
    """Steps in which each request, alone, is surely done, with a step's slack at either end."""
    return sum(request.max_length + 4 for request in requests)


def _count_what_happened(run: Run, scheduler: Scheduler) -> None:
    happened, counters = run.happened, scheduler.counters
    happened["requests"] += len(run.requests)
    happened["steps"] += run.num_steps
    happened["preemptions"] += counters.num_preemptions
    happened["tokens"] += counters.num_output_tokens
    happened["forks"] += counters.num_forks
    happened["holdings given up"] += counters.num_given_up
    happened["blocks swapped out"] += counters.num_swapped_out
    happened["blocks swapped in"] += counters.num_swapped_in
    happened["blocks copied on write"] += counters.num_copied
    cache = scheduler.cache_stats()
    happened["blocks found in the cache"] += cache.hit_blocks
    happened["blocks evicted"] += cache.num_evictions
    options = run.schedule.options
    for policy in ("order", "preemption", "prefix_cache"):
        happened[f"{policy}: {options.get(policy)}"] += 1
    happened[f"lag: {run.schedule.lag}"] += 1
    happened["chunked_prefill: False"] += not options.get("chunked_prefill", True)
    for request in run.requests.values():
        happened["requests, greedy" if request.params.is_greedy else "requests, sampled"] += 1
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
    """No request waits for one that came after it and has a worse place in the order.

    From its arrival it is done within twice the steps that all others take one after the other: once for their tokens,
    and once because what gives way to them is computed again.
    """
    for number, ended in run.ended.items():
        began = run.began[number]
        ahead = [
            request
            for other, request in run.requests.items()
            if run.began[other] <= began or not run.is_behind(other, number)
        ]
        bound = 2 * _work(ahead)
        assert ended - began <= bound, f"request {number} took {ended - began} steps, at most {bound} are needed"


def check_nothing_is_left(scheduler: Scheduler) -> None:
    """No block, row or sequence outlives its request."""
    pool, table = scheduler.pool, scheduler.table
    assert pool.num_referenced == 0, f"{pool.num_referenced} blocks are left behind"
    assert pool.num_free + pool.num_cached == pool.num_blocks
    host = scheduler.host_pool
    assert host is None or host.num_free == host.num_blocks, "a block of the host is left behind"
    states = scheduler.states
    if states is not None:
        assert states.pool.num_referenced == 0, f"{states.pool.num_referenced} states are left behind"
        assert states.host_pool is None or states.host_pool.num_referenced == 0, "a state of the host is left behind"
    assert table.num_free_rows == table.num_rows, "a row is left behind"
    assert all(sequence is None for sequence in table.sequences)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished) == (0, 0, False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tsched.schedules", description=__doc__)
    parser.add_argument("--model", choices=sorted(SERVERS), default="hash")
    parser.add_argument("--architecture", help="of the float64 model; Qwen3 where none is named")
    parser.add_argument("--count", type=int, default=100, help="schedules of the seeds from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this schedule alone, described")
    arguments = parser.parse_args()
    make_server = server_factory(arguments.model, arguments.architecture)
    if arguments.seed is not None:
        schedule = draw_schedule(arguments.seed)
        print(describe(schedule))
        print(dict(sorted(serve(schedule, make_server).happened.items())))
        return
    began = time.perf_counter()
    total: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.count):
        model = " --architecture ".join(filter(None, (arguments.model, arguments.architecture)))
        total += serve_or_say_how_to_replay(draw_schedule(seed), make_server, model).happened
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


def server_factory(model: str, architecture: str | None = None) -> Callable[[Schedule], Server]:
    module, name = SERVERS[model]
    factory: Callable[..., Server] = getattr(import_module(module), name)
    return factory if architecture is None else partial(factory, architecture=architecture)


def describe(schedule: Schedule) -> str:
    lines = [f"schedule {schedule.seed}: lag {schedule.lag}, pressure {schedule.pressure:.0%}, {schedule.options}"]
    lines += [f"  request {number}: {request}" for number, request in enumerate(schedule.requests)]
    lines += [f"  {event}" for event in schedule.events]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
