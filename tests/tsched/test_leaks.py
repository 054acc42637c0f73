"""After many aborts, from every state, nothing is left behind."""

from __future__ import annotations

import os
import threading
from collections import Counter
from itertools import product

from tests.tsched.random_schedules import draw_schedule
from tests.tsched.schedules import serve_or_say_how_to_replay, server_factory
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES

ABORTS = 1000


def test_a_thousand_aborts_leave_nothing_behind() -> None:
    """`serve` looks after blocks, rows and queues, of the device and of the host, at the end of each run."""
    policies = list(product(sorted(ORDERS), sorted(PREEMPTIONS), sorted(PREFIX_CACHES)))
    happened: Counter[str] = Counter()
    make_server = server_factory("hash")
    seed = 0
    while sum(happened[what] for what in happened if what.startswith("abort")) < ABORTS:
        order, preemption, prefix_cache = policies[seed % len(policies)]
        schedule = draw_schedule(
            seed, num_requests=60, num_aborts=50, order=order, preemption=preemption, prefix_cache=prefix_cache
        )
        happened += serve_or_say_how_to_replay(schedule, make_server, "hash").happened
        seed += 1
    assert seed >= len(policies)
    assert happened["end: abort"] >= ABORTS


def test_the_engine_leaves_no_file_and_no_thread_behind() -> None:
    """What asynchronous serving leaves (tasks, threads, files) is looked after where it is tested."""
    make_server = server_factory("float64")
    serve_or_say_how_to_replay(
        draw_schedule(0, num_requests=8, num_aborts=0), make_server, "float64"
    )  # loads the model
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    run = serve_or_say_how_to_replay(draw_schedule(1, num_requests=12, num_aborts=20), make_server, "float64")
    assert run.happened["end: abort"] > 5
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (files, threads)
