"""The order of a plan's copies is in one place, which the engine and every simulated device go through.

No plan that the scheduler makes today has copies whose order matters: who swaps out admits nobody, and a page that is
copied on write is held by two. So no schedule can show it, and a plan made by hand does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.tsched.array_pages import ArrayPages
from tests.tsched.hash_model import HashModel, hash_cache
from tests.tsched.hash_server import PagedDevice
from tests.tsched.page_contents import PageContents
from tests.tsched.planted_bugs import PlantedBug, planted
from tests.tsched.schedulers import build_scheduler
from tests.tsched.simulated_device import SimulatedDevice
from tests.tsched.state_server import StateDevice
from tkernels.runtime import HostRuntime
from tsched.execution.model_runner import ModelRunner
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.kv_memory import KVMemory
from tsched.scheduling.policies.no_prefix_cache import NoPrefixCache
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Holding, Sequence
from tsched.scheduling.step_plan import StepPlan


@dataclass(frozen=True)
class Device:
    """Four pages of a device and four of its host, as many states where it has any, and how it carries out a plan."""

    pages: ArrayPages
    states: ArrayPages | None
    carry_out: Callable[[StepPlan], object]


def make_scheduler(*, with_states: bool) -> Scheduler:
    sizes: dict[str, Any] = {"num_blocks": 4, "block_size": 2, "num_host_blocks": 4, "max_model_len": 8}
    if with_states:
        sizes |= {"num_states": 4, "num_host_states": 4, "state_interval": 1}
    return build_scheduler(**sizes, max_num_seqs=2, max_num_batched_tokens=8)


def the_engines(scheduler: Scheduler) -> Device:
    """What the engine's runner does to tensors, which these arrays share their memory with."""
    cache = hash_cache(4, 2)
    pages = ArrayPages(cache[0][0].numpy(), np.zeros((4, 2, 1, 1)))
    states = ArrayPages(np.zeros(4), np.zeros(4))
    runner = ModelRunner(HashModel(), cache, scheduler, runtime=HostRuntime(), pages=pages, states=states)
    return Device(pages, states, runner.compute)


def a_paged_device(scheduler: Scheduler) -> Device:
    device = PagedDevice(scheduler)
    return Device(ArrayPages(device.pages, device.host_pages), None, device.carry_out)


def a_device_with_states(scheduler: Scheduler) -> Device:
    device = StateDevice(scheduler)
    return Device(ArrayPages(device.pages, device.host_pages), device.state_pages, device.carry_out)


def a_simulated_device(scheduler: Scheduler) -> Device:
    device = SimulatedDevice(scheduler)
    pages = ArrayPages(device.cached_token.reshape(4, 2), device.host_token.reshape(4, 2))
    return Device(pages, None, lambda plan: device.run(device.build(plan)))


def the_contents_of_pages(scheduler: Scheduler) -> Device:
    contents = PageContents(scheduler)
    memory = contents.issued
    states = ArrayPages(memory.states, memory.host_states)
    return Device(ArrayPages(memory.device, memory.host), states, contents.issue)


WITH_STATES = (the_engines, a_device_with_states, the_contents_of_pages)
DEVICES = (*WITH_STATES, a_paged_device, a_simulated_device)


def fill(pages: ArrayPages) -> None:
    """Pages 0 to 3 of the device hold their number, those of the host 10 more."""
    pages.device.reshape(4, -1)[:] = np.arange(4).reshape(4, 1)
    pages.host.reshape(4, -1)[:] = np.arange(10, 14).reshape(4, 1)


def contents(pages: ArrayPages) -> tuple[list[int], list[int]]:
    device, host = pages.device.reshape(4, -1), pages.host.reshape(4, -1)
    assert (device == device[:, :1]).all()
    assert (host == host[:, :1]).all()
    return device[:, 0].astype(int).tolist(), host[:, 0].astype(int).tolist()


def pairs(*given: tuple[int, int]) -> NDArray[np.int32]:
    return np.array(given, dtype=np.int32).T


def check_moves(make_device: Callable[[Scheduler], Device]) -> None:
    """Pages 0 and 1 leave for the host; another comes back into page 0, and page 1 becomes a copy of that one."""
    scheduler = make_scheduler(with_states=make_device in WITH_STATES)
    device = make_device(scheduler)
    fill(device.pages)
    plan = replace(scheduler.schedule(), swap_outs=pairs((0, 0), (1, 1)), swap_ins=pairs((2, 0)), copies=pairs((0, 1)))
    if device.states is not None:
        fill(device.states)
        assert plan.states is not None
        plan.states = replace(plan.states, swap_outs=pairs((3, 3)), swap_ins=pairs((2, 3)))
    device.carry_out(plan)
    assert contents(device.pages) == ([12, 12, 2, 3], [0, 1, 12, 13])
    if device.states is not None:
        assert contents(device.states) == ([0, 1, 2, 12], [10, 11, 12, 3])


@pytest.mark.parametrize("make_device", DEVICES)
def test_what_leaves_is_read_before_its_page_is_written(make_device: Callable[[Scheduler], Device]) -> None:
    check_moves(make_device)


def test_a_page_is_given_away_as_soon_as_its_copying_out_is_planned() -> None:
    """What KVMemory counts on: in one plan a sequence leaves the only page there is, and another comes back into it."""
    pool, host = BlockPool(1, 2), BlockPool(2, 2)
    memory = KVMemory(pool, NoPrefixCache(pool), host)
    first, second = (Sequence(i, [1, 2, 3], SamplingParams(), 3) for i in range(2))
    pages, empty = ArrayPages(np.zeros(1), np.zeros(2)), make_scheduler(with_states=False).schedule()
    for sequence in (first, second):
        blocks = memory.cache.allocate(1)
        pages.device[blocks] = sequence.id + 5  # as its own forward writes it
        assert memory.swap_out(sequence, Holding(blocks, 2))
        memory.cache.release(sequence, blocks, 0)
        if sequence is first:
            (outs,) = memory.take_copies().swap_outs
            replace(empty, swap_outs=outs).move_pages(pages, None)
    assert first.host_blocks.tolist() != second.host_blocks.tolist()
    first.tokens = first.tokens[:2]
    found = memory.enter(first, 0)
    assert found is not None
    copies = memory.take_copies()
    (outs,), (ins,) = copies.swap_outs, copies.swap_ins
    replace(empty, swap_outs=outs, swap_ins=ins).move_pages(pages, None)
    assert pages.device[found[0]].tolist() == [5]
    assert pages.host[second.host_blocks].tolist() == [6]


PAGES = ("_move(pages.swap_out, self.swap_outs)", "_move(pages.swap_in, self.swap_ins)",
         "_move(pages.copy, self.copies)")  # fmt: skip
STATES = ("_move(states.swap_out, self.states.swap_outs)", "_move(states.swap_in, self.states.swap_ins)")


def other_orders() -> Iterator[Any]:
    for lines, indent, devices in ((PAGES, 4, DEVICES), (STATES, 8, WITH_STATES)):
        right, *others = permutations(lines)
        for order in others:
            wrong = [line.split("(")[1].split(",")[0] for line in order]
            joined = [("\n" + " " * indent).join(one) for one in (right, order)]
            for make_device in devices:
                name = f"{', '.join(wrong)}: {make_device.__name__}"
                yield pytest.param(make_device, PlantedBug(name, StepPlan, "move_pages", *joined), id=name)


@pytest.mark.parametrize(("make_device", "fault"), [*other_orders()])
def test_every_other_order_is_caught(make_device: Callable[[Scheduler], Device], fault: PlantedBug) -> None:
    with planted(fault), pytest.raises(AssertionError):
        check_moves(make_device)
