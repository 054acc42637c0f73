"""Random schedules, at a small size: each request gets the tokens that it gets alone, and nothing is left behind.

The full size: python -m tests.tsched.schedules --count 2000 --model hash | float64, --count 500
--model shared, and --count 50 --model rowwise.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.tsched.engine_server import SharingServer
from tests.tsched.random_model import ARCHITECTURES
from tests.tsched.random_schedules import draw_schedule
from tests.tsched.schedules import serve_or_say_how_to_replay, server_factory
from tmodel import known_architectures

NUM_HASH_SCHEDULES = 100
NUM_SHARING_SCHEDULES = 12


@pytest.mark.parametrize(("model", "count"), [("hash", NUM_HASH_SCHEDULES), ("float64", 5), ("rowwise", 2)])
def test_each_request_gets_the_tokens_it_gets_alone(model: str, count: int) -> None:
    make_server = server_factory(model)
    happened: Counter[str] = Counter()
    for seed in range(count):
        happened += serve_or_say_how_to_replay(draw_schedule(seed), make_server, model).happened
    assert happened["tokens"] > 0
    if model == "hash":
        states = ("new", "prefill", "decode", "preempted", "swapped", "forked")
        assert min(happened[f"{event}: {state}"] for event in ("abort", "fork") for state in states) > 0
        assert min(happened[f"blocks {what}"] for what in ("swapped in", "copied on write", "evicted")) > 0
        assert happened["holdings given up"] > 0


@pytest.mark.parametrize("count", [NUM_SHARING_SCHEDULES, pytest.param(60, marks=pytest.mark.slow)])
def test_reading_shared_prefixes_together_changes_no_token(count: int) -> None:
    make_server, before = server_factory("shared"), SharingServer.num_shared
    for seed in range(count):
        serve_or_say_how_to_replay(draw_schedule(seed), make_server, "shared")
    assert SharingServer.num_shared - before > count


@pytest.mark.parametrize("num_greedy", [1, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_architectures_requests_get_the_tokens_they_get_alone(architecture: str, num_greedy: int) -> None:
    make_server = server_factory("float64", architecture)
    happened: Counter[str] = Counter()
    seed = 0
    while happened["requests, greedy"] < num_greedy:
        schedule = draw_schedule(seed)
        happened += serve_or_say_how_to_replay(schedule, make_server, f"float64 --architecture {architecture}").happened
        seed += 1
    assert happened["tokens"] > 0


def test_every_architecture_is_served_in_schedules() -> None:
    assert ARCHITECTURES.keys() == known_architectures().keys()


def test_a_schedule_is_a_function_of_its_seed() -> None:
    assert draw_schedule(3) == draw_schedule(3) != draw_schedule(4)
    assert all(1.1 <= draw_schedule(seed).pressure <= 4.0 for seed in range(100))
