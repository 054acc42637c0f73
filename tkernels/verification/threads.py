"""Races between the threads of one program, through memory: Triton orders registers, not what is stored and loaded.

A block's elements belong to threads. What one thread stores, another may load, or store otherwise, before the first has
got there, unless a barrier stands between. Which thread has an element follows from its place in its block, so the same
place in a block of the same shape is taken for the same thread; whatever else meets in one element is a race.
"""

from dataclasses import dataclass, field

import numpy as np

from tkernels.verification.sites import Site


@dataclass(frozen=True)
class ThreadRace:
    """What one thread stored at `earlier`, another loads or stores at `later`; `address` is what both touch."""

    program: int
    address: int
    earlier: Site
    later: Site


@dataclass(frozen=True)
class _Store:
    """One store of a block: addresses int64 [n], ascending; of each its place and the bytes left there [n, width]."""

    addresses: np.ndarray
    places: np.ndarray
    values: np.ndarray
    site: Site


@dataclass
class ThreadOrder:
    """Looks at the accesses of a launch as they are made; `race` is the first that was found."""

    race: ThreadRace | None = None
    _stores: dict[int, list[_Store]] = field(default_factory=dict)
    _shapes: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add_barrier(self, program: int) -> None:
        """All threads of the program have done what stands before."""
        self._stores.pop(program, None)

    def add(
        self, program: int, addresses: np.ndarray, live: np.ndarray, site: Site, values: np.ndarray | None = None
    ) -> None:
        """Notes a load, or a store of `values`.

        Args:
            addresses: int64, of any shape: one for each element of a block.
            live: bool, the same shape: which of them are accessed.
            values: uint8 [live elements, width].
        """
        shape = tuple(n for n in addresses.shape if n > 1)
        number = self._shapes.setdefault(shape, len(self._shapes))
        places = np.flatnonzero(live) + (number << 40)
        where = addresses[live].astype(np.int64)
        if not len(where):
            return
        self._compare(program, where, places, site, values)
        if values is not None:
            order = np.argsort(where, kind="stable")
            stored = _Store(where[order], places[order], values[order], site)
            self._stores.setdefault(program, []).append(stored)

    def _compare(
        self, program: int, where: np.ndarray, places: np.ndarray, site: Site, values: np.ndarray | None
    ) -> None:
        """With the last store to each of these addresses since the program's last barrier."""
        open_ones = np.ones(len(where), dtype=bool)
        for store in reversed(self._stores.get(program, ())):
            if self.race is not None or where.max() < store.addresses[0] or where.min() > store.addresses[-1]:
                continue
            at = np.minimum(np.searchsorted(store.addresses, where), len(store.addresses) - 1)
            met = open_ones & (store.addresses[at] == where)
            others = met & (store.places[at] != places)
            if values is not None and values.shape[1] == store.values.shape[1]:
                others &= (store.values[at] != values).any(axis=1)  # the same bits are left whoever comes last
            if others.any():
                self.race = ThreadRace(program, int(where[others][0]), store.site, site)
            open_ones &= ~met
