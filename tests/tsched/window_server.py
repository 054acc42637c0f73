"""A scheduler with a device whose layers all have a window.

The next token follows from what is read back of the last tokens alone, through a table whose entries before them may be
anything by now. Beside token, place and tenant a slot holds the hash of all tokens up to it, so that who goes on from
another history than its own gets another token, however alike the last tokens are.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from typing import Any

import numpy as np

from tests.tsched.hash_server import EMPTY, HashServer, PagedDevice, next_token
from tests.tsched.random_schedules import Schedule
from tests.tsched.schedulers import build_scheduler
from tsched.scheduling.scheduler import Scheduler, StepPlan
from tsched.scheduling.sequence import Ints


def hashes_after(before: int, tokens: list[int]) -> list[int]:
    """The hash of all tokens up to each of `tokens`, `before` being that of those before them."""
    hashes = []
    for token in tokens:
        before = zlib.crc32(token.to_bytes(8, "little"), before)
        hashes.append(before)
    return hashes


def count_passed(place: int, window: int, block_size: int) -> int:
    """The blocks that end before the first key that a query at `place` sees."""
    return max(0, place + 1 - window) // block_size


def most_held(window: int, chunk: int, block_size: int) -> int:
    """The blocks that a sequence may hold at once."""
    return -(-(window + chunk) // block_size) + 1


class WindowDevice(PagedDevice):
    """Pages [num_blocks, block_size, 4], the last being the hash."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.pages, self.host_pages = (
            np.concatenate((pages, np.full_like(pages[..., :1], EMPTY)), axis=-1)
            for pages in (self.pages, self.host_pages)
        )
        assert scheduler.window is not None
        self.size = scheduler.window.size
        # Of each plan that is not committed: (row, epoch) -> where the row's tokens begin and end.
        self.under_way: deque[dict[tuple[int, int], tuple[int, int]]] = deque()
        self._hashed: dict[tuple[int, int], tuple[int, int]] = {}  # (row, epoch) -> how far, the last hash

    def carry_out(self, plan: StepPlan) -> Ints:
        epochs = self.scheduler.table.epoch[plan.rows].tolist()
        spans = zip(plan.starts.tolist(), plan.ends.tolist(), strict=True)
        self.under_way.append(dict(zip(zip(plan.rows.tolist(), epochs, strict=True), spans, strict=True)))
        self.check_held()
        return super().carry_out(plan)

    def check_held(self) -> None:
        """Nobody gives a block back that a plan under way sees, and nobody has more of them than may be."""
        scheduler, table = self.scheduler, self.scheduler.table
        assert scheduler.window is not None
        most = min(scheduler.window.most_blocks, scheduler.pool.num_blocks)
        for row in scheduler.running.tolist():
            first, end = int(table.first_block[row]), int(table.num_blocks[row])
            assert end - first <= most, f"row {row} has {end - first} blocks, {most} at most"
            key = (row, int(table.epoch[row]))
            for start, _ in [spans[key] for spans in self.under_way if key in spans]:
                passed = count_passed(start, self.size, table.block_size)
                assert first <= passed, f"a block of row {row} was given back that a plan under way sees"

    def check_given_back(self, spans: dict[tuple[int, int], tuple[int, int]]) -> None:
        """What no later token sees has been given back by the rows of a plan that has been committed."""
        table = self.scheduler.table
        for (row, epoch), (_, end) in spans.items():
            if table.sequences[row] is not None and table.epoch[row] == epoch:
                passed = count_passed(end, self.size, table.block_size)
                assert table.first_block[row] == passed, f"row {row} has a block that nobody sees any more"

    def _write(self, plan: StepPlan) -> None:
        super()._write(plan)
        table = self.scheduler.table
        for row, start, end in zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True):
            key = (row, int(table.epoch[row]))
            done, before = self._hashed.get(key, (0, 0))
            if done != start:
                before = hashes_after(0, table.tokens[row, :start].tolist())[-1] if start else 0
            slots = self._slots(row, np.arange(start, end))
            hashes = hashes_after(before, self.pages[slots][:, 0].tolist())
            self.pages[*slots, 3] = hashes
            self._hashed[key] = end, hashes[-1]
            seen = np.arange(max(0, start + 1 - self.size), end)
            found = self.pages[self._slots(row, seen)]
            assert (found[:, 1] == seen).all(), "a key in the window is of another place"
            assert (found[:, 2] == self._tenant(row)).all(), "a key in the window is another tenant's"

    def token_of(self, row: int, length: int, draw: int) -> int:
        facts = self.pages[self._slots(row, np.arange(max(0, length - self.size), length))]
        return next_token(facts[:, [0, 1, 3]], int(facts[-1, 2]), draw)


class WindowServer(HashServer):
    """A HashServer of such a device, with a window that the seed draws unless the schedule has one, and a pool that is
    as short of blocks for windows as the schedule's is for whole sequences.
    """

    device: WindowDevice

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._known: tuple[list[int], list[int]] = ([], [])  # tokens that were asked about last, and their hashes

    def make_scheduler(self, schedule: Schedule) -> Scheduler:
        return build_scheduler(**schedule.options if "window" in schedule.options else draw_window(schedule))

    def make_device(self) -> WindowDevice:
        return WindowDevice(self.scheduler)

    def step(self) -> None:
        super().step()
        while len(self.device.under_way) > len(self._launches):
            self.device.check_given_back(self.device.under_way.popleft())
        self.device.check_held()

    def token_alone(self, tokens: list[int], tenant: int, draw: int) -> int:
        known, hashes = self._known
        if tokens[: len(known)] != known:
            known, hashes = [], []
        added = tokens[len(known) :]
        self._known = known, hashes = known + added, hashes + hashes_after(hashes[-1] if hashes else 0, added)
        places = range(max(0, len(tokens) - self.device.size), len(tokens))
        facts = np.array([(tokens[place], place, hashes[place]) for place in places], dtype=np.int64)
        return next_token(facts, tenant, draw)


def draw_window(schedule: Schedule, window: int | None = None) -> dict[str, Any]:
    """The schedule's options with a window, drawn unless it is given, and with as much pressure on the blocks that
    windows take as it has on those of whole sequences.
    """
    options, rng = schedule.options, random.Random(schedule.seed)
    window, block_size = window or rng.choice((2, 3, 5, 8, 16, 24, 40)), options["block_size"]
    chunk = min(options["max_num_batched_tokens"], options.get("max_chunk_tokens") or 10**9)
    most = most_held(window, chunk, block_size)
    if options.get("chunked_prefill", True) and rng.random() < 0.8:
        most = most_held(window, 0, block_size)  # the pool is what bounds the chunks
    lengths = [member.max_length - 1 for request in schedule.requests for member in request.members]
    needs = sorted((min(-(-length // block_size), most) for length in lengths), reverse=True)
    demand = sum(needs[: options["max_num_seqs"]])
    return options | {"window": window, "num_blocks": max(needs[0], int(demand / schedule.pressure))}
