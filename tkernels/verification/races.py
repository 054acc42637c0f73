"""Data races between the programs of a launch, found from what the interpreter sees of one run.

Two accesses of different programs to one element, not both atomic and one of them a write, are a race where nothing
orders them: a GPU may make them in either order, or show one program half of what another has done. What orders them
is a chain of edges from one to the other: a program's own order, and an atomic with acquire semantics that reads what
an atomic with release semantics wrote (vector clocks as in Djit+, Pozniansky and Schuster, PPoPP 2003, kept per program
as FastTrack does, Flanagan and Freund, PLDI 2009). A release is one thread's: it publishes what its program did before
its last barrier, not what the other threads may still be doing (PTX memory model, causality order).

The threads of one program race too: see `threads`.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from triton._C.libtriton import ir
from triton.runtime import interpreter as triton_interpreter

from tkernels.config import Config
from tkernels.contract import Case
from tkernels.errors import TKernelsError
from tkernels.inputs import clone_inputs, roughen_floats
from tkernels.interpreter.accesses import element_bytes
from tkernels.interpreter.replaced import replaced_methods
from tkernels.launch import Door
from tkernels.variant import Variant
from tkernels.verification.addresses import place_of, sanitizing_door
from tkernels.verification.calls import call
from tkernels.verification.program_order import permuted_programs, programs_of
from tkernels.verification.sites import Site, describe_site, kernel_site, result_is_used
from tkernels.verification.threads import ATOMIC, READ, WRITE, ThreadOrder, ThreadRace, watch_crossings

_VERBS = {READ: "loads", WRITE: "stores", ATOMIC: "updates"}


class RaceError(TKernelsError, RuntimeError):
    """Two programs of one launch access an element, one of them writes it, and nothing orders the two."""


@dataclass(frozen=True)
class Race:
    """Two accesses without an order, by their numbers in a History; `cell` is what both touch."""

    earlier: int
    later: int
    cell: int


@dataclass(frozen=True, slots=True)
class Access:
    """One load, store or atomic of a program.

    program: Its number in the launch. epoch: How many barriers it has passed, from 1; one less for an atomic that is
    itself a release. clock: Of the program at that time, int32 [programs]: the last epoch of each program that happened
    before. addresses: int64 [lanes], of live lanes. values: the bytes that a store leaves, uint8 [lanes, width]; None
    for others.
    """

    kind: int
    program: int
    epoch: int
    clock: np.ndarray
    site: Site
    addresses: np.ndarray
    width: int
    values: np.ndarray | None


class History:
    """The accesses of a launch in the order in which they were made, and the clocks that order them.

    Args:
        programs: How many the launch has.
    """

    def __init__(self, programs: int) -> None:
        self.accesses: list[Access] = []
        self._clocks = np.zeros((programs, programs), dtype=np.int32)
        np.fill_diagonal(self._clocks, 1)
        self._clock_of = [row.copy() for row in self._clocks]  # what accesses share until it changes
        self._published = np.zeros_like(self._clocks)  # what a release of the program makes known
        self._pending = np.zeros_like(self._clocks)  # what single lanes have acquired, the others from a barrier on
        self._released: dict[int, np.ndarray] = {}
        self.threads = ThreadOrder()

    def add(
        self,
        kind: int,
        program: int,
        site: Site,
        addresses: np.ndarray,
        width: int,
        values: np.ndarray | None = None,
        releases: bool = False,
    ) -> None:
        """Notes an access of a program as it is now; `releases`: it is known to whom it makes the others known."""
        if kind == WRITE:  # what an acquire reads from now on was written by no atomic
            for address in self._released.keys() & set(addresses.tolist()) if self._released else ():
                del self._released[address]
        clock = self._clock_of[program]
        epoch = int(clock[program]) - releases
        self.accesses.append(Access(kind, program, epoch, clock, site, addresses, width, values))

    def add_barrier(self, program: int) -> None:
        """All threads of the program have done what stands before, and know what any of them has acquired."""
        self.threads.add_barrier()
        self._clocks[program] = np.maximum(self._clocks[program], self._pending[program])
        self._published[program] = self._clocks[program]
        self._clocks[program, program] += 1
        self._clock_of[program] = self._clocks[program].copy()

    def acquire(self, program: int, addresses: np.ndarray, by_all: bool) -> None:
        """The program knows what was released at these addresses: at once, or its other threads after a barrier."""
        for address in addresses.tolist():
            released = self._released.get(address)
            if released is None:
                continue
            self._published[program] = np.maximum(self._published[program], released)
            known = self._clocks if by_all else self._pending
            known[program] = np.maximum(known[program], released)
        self._clock_of[program] = self._clocks[program].copy()

    def release(self, program: int, addresses: np.ndarray) -> None:
        """Whoever acquires at these addresses knows what the program had done by its last barrier."""
        for address in addresses.tolist():
            before = self._released.get(address)
            published = self._published[program]
            self._released[address] = published.copy() if before is None else np.maximum(before, published)

    def find_race(self) -> Race | None:
        """The first race by the time of its later access, or None."""
        races = [race for race in (self._plain_race(), self._atomic_race()) if race is not None]
        return min(races, key=lambda race: race.later, default=None)

    def _plain_race(self) -> Race | None:
        """Among loads and stores: each with the store before it, and each load with the store after it."""
        cells = _cells(self.accesses, kinds=(READ, WRITE))
        if not len(cells.cell):
            return None
        order = np.lexsort((cells.access, cells.cell))
        cell, access, value, writes = (
            cells.cell[order], cells.access[order], cells.value[order], cells.kind[order] == WRITE
        )  # fmt: skip
        index = np.arange(len(cell))
        begins = np.append(True, cell[1:] != cell[:-1])
        first = np.maximum.accumulate(np.where(begins, index, 0))
        # The last store before each access and the next one after it, in the same cell; -1 where there is none.
        so_far = np.maximum.accumulate(np.where(writes, index, -1))
        before = np.append(-1, so_far[:-1])
        before = np.where(before >= first, before, -1)
        to_come = np.minimum.accumulate(np.where(writes, index, len(cell))[::-1])[::-1]
        after = np.append(to_come[1:], len(cell))
        after = np.where((after < len(cell)) & (cell[np.minimum(after, len(cell) - 1)] == cell), after, -1)
        after = np.where(writes, -1, after)
        pairs = [(before[before >= 0], index[before >= 0]), (index[after >= 0], after[after >= 0])]
        earlier, later = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
        # Two stores of the same bits leave the same, whichever comes last.
        same = writes[earlier] & writes[later] & (value[earlier] == value[later])
        return self._first_unordered(access[earlier[~same]], access[later[~same]], cell[later[~same]])

    def _atomic_race(self) -> Race | None:
        """Between atomics and loads or stores, element by element: launches have few atomics."""
        cells = _cells(self.accesses, kinds=(READ, WRITE, ATOMIC))
        touched = np.unique(cells.cell[cells.kind == ATOMIC])
        if not len(touched):
            return None
        mine = np.isin(cells.cell, touched)
        order = np.lexsort((cells.access[mine], cells.cell[mine]))
        cell, access, kind = cells.cell[mine][order], cells.access[mine][order], cells.kind[mine][order]
        found: list[tuple[int, int, int]] = []
        for begin, end in itertools.pairwise((*np.flatnonzero(np.diff(cell, prepend=-1)).tolist(), len(cell))):
            atomics: list[int] = []
            plain: list[int] = []
            for i in range(begin, end):
                others = plain if kind[i] == ATOMIC else atomics
                found.extend((access[other], access[i], cell[i]) for other in others)
                if kind[i] == WRITE:  # what stood before was compared with it, and what comes is with it
                    atomics, plain = [], []
                (atomics if kind[i] == ATOMIC else plain).append(i)
        if not found:
            return None
        earlier, later, where = (np.array(column) for column in zip(*found, strict=True))
        return self._first_unordered(earlier, later, where)

    def _first_unordered(self, earlier: np.ndarray, later: np.ndarray, cell: np.ndarray) -> Race | None:
        """The first of these pairs of accesses whose earlier one did not happen before the later one."""
        if not len(earlier):
            return None
        pairs, place = np.unique(np.stack([later, earlier], axis=1), axis=0, return_index=True)  # by the later one
        for (late, early), where in zip(pairs.tolist(), cell[place].tolist(), strict=True):
            one, two = self.accesses[early], self.accesses[late]
            if one.program != two.program and two.clock[one.program] < one.epoch:
                return Race(early, late, where)
        return None


@dataclass(frozen=True)
class _Cells:
    """Accesses cut into cells of the same size: of each its address, its access's number and kind, a store's bits."""

    cell: np.ndarray
    access: np.ndarray
    kind: np.ndarray
    value: np.ndarray


def _cells(accesses: list[Access], kinds: tuple[int, ...]) -> _Cells:
    """The cells that somebody writes. What is only read cannot race, and is most of all."""
    chosen = [(number, one) for number, one in enumerate(accesses) if one.kind in kinds and len(one.addresses)]
    written = [one for _, one in chosen if one.kind != READ]
    if not written:
        nothing = np.zeros(0, dtype=np.int64)
        return _Cells(nothing, nothing, nothing, nothing)
    low = min(int(one.addresses.min()) for one in written)
    high = max(int(one.addresses.max()) + one.width for one in written)
    size = int(np.gcd.reduce([one.width for one in written]))  # a power of two, so a narrower read is the only surprise
    size = min([size, *(one.width for _, one in chosen)])
    columns: list[tuple[np.ndarray, ...]] = []
    for number, one in chosen:
        parts = one.width // size
        near = (one.addresses < high) & (one.addresses + one.width > low)
        address = (one.addresses[near, None] + size * np.arange(parts)).ravel()
        value = np.full(len(address), -1 - number, dtype=np.int64).view(np.uint64)  # another than every other's
        if one.values is not None:
            padded = np.zeros((len(address), 8), dtype=np.uint8)
            padded[:, :size] = one.values[near].reshape(-1, size)
            value = padded.view(np.uint64).ravel()
        columns.append((address, np.full(len(address), number), np.full(len(address), one.kind), value))
    cell, access, kind, value = (np.concatenate(column) for column in zip(*columns, strict=True))
    kept = np.isin(cell, np.unique(cell[kind != READ]))
    return _Cells(cell[kept], access[kept], kind[kept], value[kept])


_ACQUIRES = (ir.MEM_SEMANTIC.ACQUIRE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


@dataclass(frozen=True)
class _Recorder:
    """What the interpreter calls in place of its own accesses, atomics and barriers: notes each, then makes it."""

    history: History
    number: Mapping[tuple[int, ...], int]

    @property
    def program(self) -> int:
        """The one that runs now."""
        return self.number[triton_interpreter.interpreter_builder.grid_idx]

    def note(self, kind: int, pointers: Any, mask: np.ndarray, value: Any = None, releases: bool = False) -> np.ndarray:
        """Notes an access, and returns the addresses of its live lanes."""
        addresses, live = np.broadcast_arrays(pointers.data, mask)
        live = live.astype(bool)
        where = addresses[live].astype(np.int64)
        width = element_bytes(pointers)
        stored = None
        if value is not None:
            kept = np.ascontiguousarray(np.broadcast_to(value.data, addresses.shape)[live])
            stored = kept.view(np.uint8).reshape(len(where), width)
        site = kernel_site()
        self.history.add(kind, self.program, site, where, width, stored, releases)
        if kind != ATOMIC:
            self.history.threads.add(kind, self.program, where, live, site, stored)
        return where

    def note_atomic(self, pointers: Any, mask: np.ndarray, writes: np.ndarray, sem: Any, scope: Any) -> None:
        """Notes the atomic of the lanes of `mask`; those of `writes`, a part of them, change what they read."""
        if scope == ir.MEM_SYNC_SCOPE.CTA:  # atomic for this program's own threads alone
            self.note(READ, pointers, mask)
            self.note(WRITE, pointers, writes)
            return
        failed = self.note(ATOMIC, pointers, mask & ~writes)
        written = self.note(ATOMIC, pointers, writes, releases=sem in _RELEASES)
        self.history.threads.add(ATOMIC, self.program, written, writes, kernel_site())
        # One thread makes a single atomic, and its result, where somebody reads it, reaches the others through a
        # barrier. In PTX (Triton 3.7, sm_80 and sm_90), with x stored before and loaded after:
        #     tl.atomic_add(c, 1)        seen = tl.atomic_add(c, 1)
        #     st.global                  st.global
        #     @%p1 atom.global           @%p1 atom.global
        #                                @%p1 st.shared
        #                                bar.sync 0
        #                                ld.shared
        #     ld.global                  ld.global
        # Of a block each lane's result is its own thread's.
        by_all = pointers.data.size == 1 and result_is_used()
        if by_all:
            self.history.threads.add_barrier()
        if sem in _ACQUIRES:
            self.history.acquire(self.program, np.concatenate([failed, written]), by_all)
        if sem in _RELEASES:
            self.history.release(self.program, written)


@contextmanager
def recorded_accesses(grid: tuple[int, ...]) -> Iterator[History]:
    """Keeps every access that the interpreter makes, and every edge between programs, while one launch runs."""
    builder = triton_interpreter.interpreter_builder
    number = {program: index for index, program in enumerate(programs_of(grid))}
    recorder = _Recorder(History(len(number)), number)
    load, store, barrier = builder.create_masked_load, builder.create_masked_store, builder.create_barrier
    rmw, cas = builder.create_atomic_rmw, builder.create_atomic_cas

    def noted_load(ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        recorder.note(READ, ptrs, mask.data)
        return load(ptrs, mask, *rest, **options)

    def noted_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        recorder.note(WRITE, ptrs, mask.data, value)
        return store(ptrs, value, mask, *rest)

    def noted_rmw(operation: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        live = np.broadcast_to(mask.data, ptr.data.shape).astype(bool)
        recorder.note_atomic(ptr, live, live, sem, scope)
        return rmw(operation, ptr, val, mask, sem, scope)

    def noted_cas(ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        before = cas(ptr, cmp, val, sem, scope)
        # A lane that does not find what it compares with writes nothing, and releases nothing.
        recorder.note_atomic(ptr, np.ones_like(ptr.data, dtype=bool), before.data == cmp.data, sem, scope)
        return before

    def noted_barrier() -> Any:
        recorder.history.add_barrier(recorder.program)
        return barrier()

    noting = replaced_methods(
        create_masked_load=noted_load,
        create_masked_store=noted_store,
        create_atomic_rmw=noted_rmw,
        create_atomic_cas=noted_cas,
        create_barrier=noted_barrier,
    )
    with noting, watch_crossings(recorder.history.threads):
        yield recorder.history


def describe_race(history: History, race: Race, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> str:
    """Both accesses in words: which program, what it does to which byte of which argument, and where in the source."""
    programs = programs_of(grid)
    one, two = history.accesses[race.earlier], history.accesses[race.later]

    def told(access: Access) -> str:
        return f"program {programs[access.program]} {_VERBS[access.kind]} it at {describe_site(access.site)}"

    return f"nothing orders two accesses to {place_of(arguments, race.cell)}: {told(one)}; {told(two)}"


def describe_thread_race(race: ThreadRace, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> str:
    """The same of two threads of one program."""
    place, program = place_of(arguments, race.address), programs_of(grid)[race.program]
    return (
        f"nothing orders two accesses to {place} of threads of program {program}, which need a tl.debug_barrier(): one "
        f"{_VERBS[race.earlier[0]]} it at {describe_site(race.earlier[1])}; another {_VERBS[race.later[0]]} it at "
        f"{describe_site(race.later[1])}"
    )


ORDERS = (None, "reversed")
"""What a program does may depend on who came before it: who is last reads what the others left."""


def racing_door(order: str | None) -> Door:
    """The interpreter, in its own order or another, which refuses a launch whose programs race."""

    def door(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], config: Config) -> None:
        with permuted_programs(grid, order) if order else nullcontext(), recorded_accesses(grid) as history:
            sanitizing_door(kernel, grid, arguments, config)
        if race := history.find_race():
            raise RaceError(f"{kernel.__name__}: {describe_race(history, race, grid, arguments)}")
        if threads := history.threads.race:
            raise RaceError(f"{kernel.__name__}: {describe_thread_race(threads, grid, arguments)}")

    return door


def check_races(variant: Variant, case: Case, config: Config | None = None) -> None:
    """Runs a variant's launches in both orders.

    Raises:
        RaceError: A launch whose programs race.
        Whatever the variant raises.
    """
    inputs = roughen_floats(case.inputs, case.seed)
    for order in ORDERS:
        call(variant, clone_inputs(inputs), config, door=racing_door(order))
