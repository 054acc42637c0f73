"""Races between the threads of one program, through memory: Triton orders registers, not what is stored and loaded.

A block's elements belong to threads. What one thread stores, another may load, or store otherwise, before the first has
got there; and what one is still to load, another may store over. Which thread has an element follows from its place in
its block, so the same place in a block of the same shape is taken for the same thread; whatever else meets in one
element is a race, unless something stands between:

- a barrier, and an atomic of one element whose result is read (see `races`);
- a sum, another reduction, a scan, a dot, a gather or a histogram whose result is read. Their results cross threads,
  and where they cross warps the compiler puts a barrier. Loading 128 elements and storing them back to front became, in
  PTX (Triton 3.7, sm_90, 4 warps): `ld.global st.global`; with a `tl.sum` between whose result nobody reads, the same;
  with one that is read, `ld.global shfl.sync st.shared bar.sync ld.shared shfl.sync st.shared bar.sync ld.shared
  st.global`. Along an axis that lies in one warp ([64, 16] by rows) it is shuffles alone: layouts decide, and a race
  behind such a one is missed here, of stores and of loads;
- for what was loaded, a reshape, transposition, split, join or cat: from then on, another place may hold what this
  thread loaded, and may store there what was made of it, as is right. A race behind one of these is missed too. It is
  no barrier (`ld.global st.global` as well), so what was stored stays open.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from tkernels.interpreter.replaced import replaced_methods
from tkernels.verification.sites import Site, result_is_used

READ, WRITE, ATOMIC = range(3)
"""Kinds of access."""


@dataclass(frozen=True)
class ThreadRace:
    """What one thread did at a place in the source, and another at a later one; `address` is what both touch.

    earlier, later: (kind, site) of each access.
    """

    program: int
    address: int
    earlier: tuple[int, Site]
    later: tuple[int, Site]


@dataclass(frozen=True)
class _BlockAccess:
    """One access of a block.

    Attributes:
        addresses: int64 [n], of its live elements in the order of their places.
        live: bool, the block's shape: which of its elements these are.
        shape: A number for the block's shape.
        values: uint8 [n, width], what a store leaves; None for others.
    """

    kind: int
    addresses: np.ndarray
    live: np.ndarray
    shape: int
    values: np.ndarray | None
    site: Site

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first and the last address."""
        return int(self.addresses.min()), int(self.addresses.max())

    @cached_property
    def places(self) -> np.ndarray:
        """int64 [n]: equal where a thread of this access is taken for one of another's."""
        return np.flatnonzero(self.live) + (self.shape << 40)

    @cached_property
    def ascending(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Addresses, places and values by ascending address."""
        order = np.argsort(self.addresses, kind="stable")
        return self.addresses[order], self.places[order], None if self.values is None else self.values[order]

    def meets(self, other: "_BlockAccess") -> bool:
        """Whether the two may touch one element."""
        return self.span[0] <= other.span[1] and other.span[0] <= self.span[1]


@dataclass
class ThreadOrder:
    """Looks at the accesses of a launch as they are made; `race` is the first that was found.

    Programs run one after the other, each to its end: what is kept is the last one's.
    """

    race: ThreadRace | None = None
    _program: int = -1
    _written: list[_BlockAccess] = field(default_factory=list)
    _loaded: list[_BlockAccess] = field(default_factory=list)
    _shapes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add_barrier(self) -> None:
        """All threads of the program that runs have done what stands before."""
        self._written.clear()
        self._loaded.clear()

    def move_elements(self) -> None:
        """The threads of the program that runs give each other what they have loaded."""
        self._loaded.clear()

    def add(
        self,
        kind: int,
        program: int,
        addresses: np.ndarray,
        live: np.ndarray,
        site: Site,
        values: np.ndarray | None = None,
    ) -> None:
        """Notes an access before it is made.

        Args:
            addresses: int64 [live elements], in the order of their places in the block.
            live: bool, the block's shape: which of its elements are accessed.
            values: uint8 [live elements, width], what a store leaves.
        """
        if self.race is not None or not len(addresses):
            return
        if program != self._program:
            self._program = program
            self.add_barrier()
        shape = tuple(n for n in live.shape if n > 1)
        number = self._shapes.setdefault(shape, len(self._shapes))
        access = _BlockAccess(kind, addresses, live, number, values, site)
        self._compare_with_itself(access)
        self._compare_with_written(access)
        if kind == READ:
            self._loaded.append(access)
            return
        self._compare_with_loaded(access)
        self._written.append(access)

    def _compare_with_itself(self, access: _BlockAccess) -> None:
        """The threads of one store with each other: of different values for one element, any stays."""
        addresses, _, values = access.ascending
        if values is None:
            return
        torn = addresses[1:] == addresses[:-1]
        if torn.any():
            torn &= (values[1:] != values[:-1]).any(axis=1)
        if torn.any():
            address = int(addresses[1:][torn][0])
            self.race = ThreadRace(self._program, address, (WRITE, access.site), (WRITE, access.site))

    def _compare_with_written(self, access: _BlockAccess) -> None:
        """With what was last stored to each of these addresses since the last barrier."""
        open_ones = np.ones(len(access.addresses), dtype=bool)
        for before in reversed(self._written):
            if self.race is not None or not access.meets(before) or before.kind == access.kind == ATOMIC:
                continue
            addresses, places, values = before.ascending
            at = np.minimum(np.searchsorted(addresses, access.addresses), len(addresses) - 1)
            met = open_ones & (addresses[at] == access.addresses)
            others = met & (places[at] != access.places)
            if values is not None and access.values is not None and access.values.shape[1] == values.shape[1]:
                others &= (values[at] != access.values).any(axis=1)  # the same bits are left whoever comes last
            self._note_race(before, access, others)
            if before.kind == WRITE:
                open_ones &= ~met

    def _compare_with_loaded(self, access: _BlockAccess) -> None:
        """With all loads of these addresses since the last barrier."""
        for before in self._loaded:
            if self.race is not None or not access.meets(before):
                continue
            addresses, places, _ = before.ascending  # several places may load one address: the first and the last here
            first = np.minimum(np.searchsorted(addresses, access.addresses), len(addresses) - 1)
            last = np.searchsorted(addresses, access.addresses, side="right") - 1
            others = addresses[first] == access.addresses
            others &= (places[first] != access.places) | (places[last] != access.places)
            if access.values is not None and others.any():  # who loads late what is there again loads the same
                others[others] = (_bytes_at(access.addresses[others], access.values) != access.values[others]).any(
                    axis=1
                )
            self._note_race(before, access, others)

    def _note_race(self, before: _BlockAccess, access: _BlockAccess, others: np.ndarray) -> None:
        """`others`: which elements of the later access another thread's earlier one touches."""
        if others.any():
            address = int(access.addresses[others][0])
            self.race = ThreadRace(self._program, address, (before.kind, before.site), (access.kind, access.site))


def _bytes_at(addresses: np.ndarray, like: np.ndarray) -> np.ndarray:
    """What memory holds at these addresses, uint8 [n, width] where `like` is [.., width]."""
    width = like.shape[1]
    held = b"".join(ctypes.string_at(address, width) for address in addresses.tolist())
    return np.frombuffer(held, dtype=np.uint8).reshape(len(addresses), width)


_CROSSING = ("create_dot", "create_gather", "create_histogram")
_MOVING = ("create_reshape", "create_trans", "create_split", "create_join", "create_cat")


@contextmanager
def watch_crossings(order: ThreadOrder) -> Iterator[None]:
    """Tells of what the interpreter does from now on that crosses threads."""
    builder, scans = triton_interpreter.interpreter_builder, triton_interpreter.ReduceScanOpInterface

    def crossed() -> None:
        if result_is_used():  # or the compiler leaves it out
            order.add_barrier()

    def behind(note: Callable[[], None], method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            note()
            return method(*arguments, **options)

        return noted

    noted = {name: behind(crossed, getattr(builder, name)) for name in _CROSSING}
    noted |= {name: behind(order.move_elements, getattr(builder, name)) for name in _MOVING}
    check_tensor = scans.check_tensor  # what each reduction and scan begins with
    scans.check_tensor = behind(crossed, check_tensor)
    try:
        with replaced_methods(**noted):
            yield
    finally:
        scans.check_tensor = check_tensor
