"""The scheduler's swappable decisions, by name. A policy is one file here and one line below.

order         who is admitted next and who gives way first
preemption    what becomes of a sequence that gives way
prefix_cache  which blocks a new sequence may take over, and who owns the free ones
"""

from __future__ import annotations

from collections.abc import Mapping

from tsched.scheduling.policies.base import Order, Preemption, PrefixCache
from tsched.scheduling.policies.fcfs import FirstComeFirstServed
from tsched.scheduling.policies.hash_prefix_cache import HashPrefixCache
from tsched.scheduling.policies.no_prefix_cache import NoPrefixCache
from tsched.scheduling.policies.priority import Priority
from tsched.scheduling.policies.radix_prefix_cache import RadixPrefixCache
from tsched.scheduling.policies.recompute import Recompute
from tsched.scheduling.policies.swap import Swap

ORDERS: Mapping[str, type[Order]] = {"fcfs": FirstComeFirstServed, "priority": Priority}
PREEMPTIONS: Mapping[str, type[Preemption]] = {"recompute": Recompute, "swap": Swap}
PREFIX_CACHES: Mapping[str, type[PrefixCache]] = {
    "none": NoPrefixCache,
    "hash": HashPrefixCache,
    "radix": RadixPrefixCache,
}
