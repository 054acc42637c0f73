"""What the scheduler asks of a policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tsched.scheduling.block_pool import BlockIds, BlockPool
from tsched.scheduling.sequence import Holding, Sequence


class Order(Protocol):
    """Who is admitted first, and who gives way first: a total order of all sequences, fixed when each one arrives."""

    def key(self, sequence: Sequence) -> int:
        """Lower is admitted first and gives way last. It follows from `arrival` and `priority` alone; for the
        progress of all, only finitely many later arrivals may have a lower one.
        """


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Sums since the cache was made. A lookup is one call of `match`, or several for a sequence that is first in the
    queue and finds no room; what it looks for are the prompt's blocks, the last, partial one included, and the prompt's
    tokens.
    """

    num_lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    num_evictions: int = 0  # blocks

    @property
    def hit_rate(self) -> float:
        """Of the blocks looked for, the share that was found; 0 where none was looked for."""
        return self.hit_blocks / self.lookup_blocks if self.lookup_blocks else 0.0

    def bytes_saved(self, bytes_per_token: int) -> int:
        """Of keys and values, `bytes_per_token` for each token that did not have to be computed."""
        return self.hit_tokens * bytes_per_token


Computed = tuple[Sequence, BlockIds, int]
"""A sequence, its blocks, and how many of its tokens are computed in them: what `insert` and `release` take."""


class PrefixCache(Protocol):
    """The owner of the device pool's free and cached blocks. What it keeps it must give up when `allocate` asks.

    A block becomes matchable only once the keys and values in it have really been computed, by a plan that has been
    committed: the scheduler calls `insert` and `release` with such tokens alone. Sequences share a block only where
    all tokens up to its end, and `Sequence.cache_salt`, are equal.

    Where every layer has a window, a sequence's blocks begin with the place `Sequence.first_block`, which `match` sets.
    """

    def __init__(self, pool: BlockPool) -> None: ...

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give now: free ones, and cached ones that can be evicted."""

    def prepare(self, sequence: Sequence) -> None:
        """`sequence.tokens` are new, or more than they were at the last call: work out what `match` needs to know of
        them (digests). Called before `match`, outside of the time that a step takes where possible.
        """

    def adopt(self, child: Sequence, parent: Sequence) -> None:
        """`child.tokens` are the first tokens of `parent`: take over what was prepared of those."""

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """The tokens from place `num_tokens` on are others now: what was prepared of them is void."""

    def match(self, sequence: Sequence, usable: Callable[[BlockIds], int] | None = None) -> BlockIds:
        """[b] blocks that hold the keys and values of the longest known prefix of `sequence.tokens` [n], with
        b * block_size < n, so that the last token is always run; referenced for the caller. Where there is a `usable`,
        only as many of the found ones, from the first, as it says.
        """

    def allocate(self, count: int) -> BlockIds:
        """[count <= num_available] blocks with one reference, the caller's; evicts the least recently used."""

    def insert(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> BlockIds:
        """The first `num_computed` of `sequence.tokens` are in `blocks` [b], b * block_size <= num_computed or not:
        whole blocks of them become matchable. What was not prepared of these tokens is prepared now.

        Returns [b] the blocks to use from now on: where equal content is cached already under another block, that
        one is returned, referenced for the caller, and the caller's own reference is released. It is the array
        `blocks` itself where none was exchanged, whose values nobody changes from then on.
        """

    def insert_each(self, computed: list[Computed]) -> list[BlockIds]:
        """`insert` for several sequences, with fewer array calls."""

    def release(self, sequence: Sequence, blocks: BlockIds, num_computed: int) -> None:
        """`insert`, and drop the caller's references to `blocks` [b]. num_computed 0 only drops them."""

    def release_each(self, left: list[Computed]) -> None:
        """`release` of several sequences, with fewer array calls."""

    def stats(self) -> CacheStats: ...


class Preemption(Protocol):
    """What becomes of a running sequence that gives way to those before it."""

    def moves_to_host(self, held: Holding) -> bool:
        """Whether what a victim `held` is copied to the host, where that has room, so that it goes on from there. Else
        it is computed again.
        """
