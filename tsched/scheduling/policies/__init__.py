"""The scheduler's swappable decisions, by name. A policy is one file here and one line below.

order         who is admitted next and who gives way first
preemption    what becomes of a sequence that gives way
prefix_cache  which blocks a new sequence may take over, and who owns the free ones
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tsched.scheduling.block_pool import BlockPool
from tsched.scheduling.policies.base import Order, Preemption, PrefixCache
from tsched.scheduling.policies.fcfs import FirstComeFirstServed
from tsched.scheduling.policies.hash_prefix_cache import HashPrefixCache
from tsched.scheduling.policies.no_prefix_cache import NoPrefixCache
from tsched.scheduling.policies.priority import Priority
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.policies.recompute import Recompute
from tsched.scheduling.policies.swap import Swap
from tsched.scheduling.policies.windowed_prefix_caches import WindowedHashCache, WindowedRadixCache
from tsched.scheduling.window import Window

ORDERS: Mapping[str, type[Order]] = {"fcfs": FirstComeFirstServed, "priority": Priority}
PREEMPTIONS: Mapping[str, type[Preemption]] = {"recompute": Recompute, "swap": Swap}
PREFIX_CACHES: Mapping[str, type[PrefixCache]] = {
    "none": NoPrefixCache,
    "hash": HashPrefixCache,
    "radix": RadixPrefixCache,
}
_WINDOWED: Mapping[str, Callable[[BlockPool, Window], PrefixCache]] = {
    "none": lambda pool, window: NoPrefixCache(pool),
    "hash": WindowedHashCache,
    "radix": WindowedRadixCache,
}
"""The same, where every layer has a window."""


def make_prefix_cache(name: str, pool: BlockPool, window: Window | None) -> PrefixCache:
    """The prefix cache of that `name` over `pool`, for layers that all have a `window`, or not."""
    return PREFIX_CACHES[name](pool) if window is None else _WINDOWED[name](pool, window)
