"""Memory that runs out anywhere on a step's way to the device and back.

The places are found, not listed: every line of tsched that the runner executes beneath `compute`, `sample` and `read`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tsched
from tests.tsched.simulated_device import VOCAB, check_accounts
from tests.tsched.test_engine import MODES, build_engine
from tsched.execution.engine import Engine
from tsched.execution.model_runner import ModelRunner
from tsched.execution.request import Request
from tsched.requests.sampling_params import SamplingParams

ROOT = str(Path(tsched.__file__).parent)
DOORS = ("compute", "sample", "read")
Place = tuple[str, int]  # a file under tsched and its line

FREE = {"temperature": 0.0, "ignore_eos": True}
PARAMS = [
    SamplingParams(max_tokens=12, **FREE),
    SamplingParams(max_tokens=12, n=2, seed=3, ignore_eos=True, top_k=5, min_p=0.05),
    SamplingParams(max_tokens=10, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=8, prompt_logprobs=1, **FREE),
    SamplingParams(max_tokens=9, logit_bias={3: 2.0}, min_tokens=3, bad_words=[[4, 5], [6]], seed=5, top_p=0.9),
    SamplingParams(max_tokens=9, allowed_token_ids=range(1, 12), **FREE),
]
PROMPTS = [[(5 * i + j) % VOCAB for j in range(4 + 2 * i)] for i in range(len(PARAMS))]


def make_engine(mode: str) -> Engine:
    """One with few blocks, which swaps, shares and copies pages."""
    return build_engine(
        num_blocks=10, num_host_blocks=12, preemption="swap", prefix_cache="hash", max_num_seqs=5,
        max_num_batched_tokens=9, seed=2, **MODES[mode],
    )  # fmt: skip


def begin(engine: Engine, first_id: int) -> dict[int, Request]:
    found = {}
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        ids = [first_id + 10 * i + sample for sample in range(params.n)]
        own = [params.derive_sample_params(sample) for sample in range(params.n)]
        group = engine.add_group(ids, prompt, own, detokenizers=[None] * params.n)
        found.update({one.sequence.id - first_id: one for one in group})
    return found


def serve(engine: Engine, first_id: int = 0) -> dict[int, Request]:
    """All requests by their numbers, served to their ends."""
    requests = begin(engine, first_id)
    finished = []
    while engine.has_unfinished:
        finished += engine.step()
        check_accounts(engine.scheduler)
    assert len(finished) == len(requests), "each request is told once"
    return requests


@contextmanager
def beneath_the_runner(at_line: Callable[[Place], None]) -> Iterator[None]:
    """Calls `at_line` before each line of tsched that the runner executes in `compute`, `sample` and `read`."""
    doors = {getattr(getattr(ModelRunner, name), "__wrapped__", getattr(ModelRunner, name)).__code__ for name in DOORS}
    inside = [0]

    def trace_line(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            at_line((frame.f_code.co_filename.removeprefix(ROOT), frame.f_lineno))
        elif event == "return" and frame.f_code in doors:
            inside[0] -= 1
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code in doors:
            inside[0] += 1
        return trace_line if inside[0] and frame.f_code.co_filename.startswith(ROOT) else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        yield
    finally:
        sys.settrace(before)


def find_places(mode: str) -> tuple[dict[Place, int], dict[int, list[int]]]:
    """Each place and how often a step is there; and what the requests' outputs are."""
    places: dict[Place, int] = {}

    def note(place: Place) -> None:
        places[place] = places.get(place, 0) + 1

    serve(make_engine(mode))  # what a process computes once is in no later run
    engine = make_engine(mode)
    with beneath_the_runner(note):
        requests = serve(engine)
    stats = engine.stats()
    assert min(stats.num_blocks_swapped_out, stats.num_blocks_swapped_in, stats.num_blocks_copied) > 0
    return places, {number: one.sequence.output_token_ids for number, one in requests.items()}


def check_place(mode: str, place: Place, time: int, expected: dict[int, list[int]]) -> int:
    """Runs out of memory before a line is executed for the `time`-th time. Returns how many requests were lost."""
    left = [time]

    def run_out(here: Place) -> None:
        if here == place:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has too little")

    engine = make_engine(mode)
    with beneath_the_runner(run_out):
        requests = serve(engine)
    assert left[0] <= 0
    lost = 0
    for number, one in requests.items():
        output = one.sequence.output_token_ids
        if one.error is None:
            assert output == expected[number], (place, number)
        else:
            lost += 1
            assert one.sequence.finish_reason == "error"
            assert "Tried to allocate 20.00 GiB." in one.error
            assert output == expected[number][: len(output)]
    scheduler = engine.scheduler
    assert scheduler.pool.num_referenced == 0
    assert scheduler.host_pool is not None
    assert scheduler.host_pool.num_referenced == 0
    assert not scheduler.has_unfinished
    again = serve(engine, first_id=1000)
    assert [one.error for one in again.values()] == [None] * len(again)
    greedy = {number: one for number, one in again.items() if one.sequence.params.is_plain}
    assert {number: one.sequence.output_token_ids for number, one in greedy.items()} == {n: expected[n] for n in greedy}
    return lost


@pytest.mark.parametrize("mode", MODES)
def test_one_line_in_some_of_a_steps_way_loses_that_step_alone(mode: str) -> None:
    places, expected = find_places(mode)
    assert len(places) > 200
    found = sorted(places)
    for place in found[:: len(found) // 8]:
        assert check_place(mode, place, (places[place] + 1) // 2, expected) < len(expected) or places[place] < 3


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_line_of_a_steps_way_loses_that_step_alone(mode: str) -> None:
    """Every second line, each in one of the modes."""
    places, expected = find_places(mode)
    found = sorted(places)[2 * list(MODES).index(mode) :: 2 * len(MODES)]
    assert len(found) > 50
    lost = [check_place(mode, place, (places[place] + 1) // 2, expected) for place in found]
    assert sum(map(bool, lost)) > 0.8 * len(lost)
