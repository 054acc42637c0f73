"""Which of a lockfile's entries a call takes its config from: the nearest, and one order of sums for all classes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tkernels.buckets import class_axes, class_distance, family, unknown_class
from tkernels.config import Config
from tkernels.lockfile import Entry, tuning_key, version_of
from tkernels.variant import Variant

Match = Literal["exact", "another class", "other Triton version", "stale source", "default"]

IN_WORDS: Mapping[Match, str] = {
    "exact": "tuned",
    "another class": "tuned for another class of sizes",
    "other Triton version": "tuned under another Triton version",
    "stale source": "tuned before its code changed",
    "default": "default, by reasoning",
}
"""Where a config came from: only "exact" was measured with this very kernel at such sizes."""


@dataclass(frozen=True)
class Nearest:
    """What a call takes its config from: the entry, how it matched, and the config."""

    entry: Entry
    match: Match
    config: Config


def find_nearest(
    variant: Variant,
    point: str,
    entries: Iterable[Entry],
    offered: Sequence[Config],
    shared: Sequence[Config] | None = None,
) -> Nearest | None:
    """What a call of a bucket gets: of the exact entries of its family, else another Triton version's, else a stale
    source's, the newest version first, that of its own class, else of the nearest one.

    Args:
        point: The bucket.
        entries: Of a lockfile.
        offered: The configs that may be used.
        shared: Those of them that an earlier call of the family settled on; None where this is the first.

    Returns:
        None where no entry has a config that is still offered.
    """
    for match, found in _by_match(variant, point, entries, offered):
        allowed = _shared_configs(variant, found, offered) if shared is None else shared
        usable = [(entry, best) for entry in found if (best := entry.best(allowed)) is not None]
        if not usable:
            continue
        entry, config = min(usable, key=lambda one: class_distance(variant, point, one[0].bucket))
        is_own = entry.bucket == point
        return Nearest(entry, match if is_own or match != "exact" else "another class", config)
    return None


def _by_match(
    variant: Variant, point: str, entries: Iterable[Entry], offered: Sequence[Config]
) -> list[tuple[Match, list[Entry]]]:
    """The entries of a bucket's family by how they match, the best first; one for each class, of the newest version."""
    op, name, source, triton_version, _ = tuning_key(variant, point)
    of_family = [
        entry
        for entry in entries
        if (entry.op, entry.variant) == (op, name)
        and family(variant, entry.bucket) == family(variant, point)
        and unknown_class(variant, entry.bucket) is None
        and entry.best(offered) is not None
    ]
    oldest_first = sorted(of_family, key=lambda entry: version_of(entry.triton))
    wanted: tuple[tuple[Match, Callable[[Entry], bool]], ...] = (
        ("exact", lambda entry: (entry.source, entry.triton) == (source, triton_version)),
        ("other Triton version", lambda entry: entry.source == source),
        ("stale source", lambda entry: True),
    )
    return [
        (match, list({entry.bucket: entry for entry in oldest_first if fits(entry)}.values())) for match, fits in wanted
    ]


def foreign_classes(variant: Variant, entries: Iterable[Entry]) -> list[str]:
    """The entries of a variant that are for a class which it does not know, in words: they are left out."""
    return [
        f"{entry.op}.{entry.variant} [{entry.bucket}] is left out: {why}"
        for entry in entries
        if (entry.op, entry.variant) == (variant.contract.name, variant.name)
        and (why := unknown_class(variant, entry.bucket)) is not None
    ]


def passed_over(
    variant: Variant,
    point: str,
    entries: Sequence[Entry],
    offered: Sequence[Config],
    why_not: Callable[[Config], str | None],
    match: Match | None,
) -> list[str]:
    """Of the entries that a call of a bucket was looked up in, those whose fastest config no call can have, in words.

    Args:
        offered: The configs that may be used.
        why_not: Why one may not be.
        match: How the entry that the call's config is from matched; None where there is none.
    """
    timed = list(dict.fromkeys(config for entry in entries for config in entry.microseconds))
    asked: dict[tuple[str, ...], Entry] = {}
    for how, found in _by_match(variant, point, entries, timed):
        asked |= {entry.key: entry for entry in found}
        if match in (how, "another class"):  # an exact entry of another class is one of the first
            break
    return [
        f"{entry.op}.{entry.variant} [{entry.bucket}]: {fastest.as_dict()} is left out: {why_not(fastest)}"
        for entry in asked.values()
        if (fastest := entry.best(timed)) is not None and fastest not in offered
    ]


def same_order(variant: Variant, config: Config, offered: Sequence[Config]) -> Sequence[Config]:
    """The offered configs that a family may use beside this one: all, but for a batch-invariant variant with classes,
    whose rows may be alone in one call and beside a thousand in the next: those that add up sums in the same order.
    """
    order = variant.sum_order
    if order is None or not (variant.batch_invariant and class_axes(variant)):
        return offered
    return [one for one in offered if order(one) == order(config)]


def _shared_configs(variant: Variant, entries: Sequence[Entry], offered: Sequence[Config]) -> Sequence[Config]:
    """The configs that the calls of a family get theirs from.

    Of the orders of sums that the configs come to, those of the one that costs the least over all classes that were
    tuned: the geometric mean of its best time over the class's best.
    """
    orders = list(dict.fromkeys(tuple(same_order(variant, config, offered)) for config in offered))

    def cost(configs: Sequence[Config]) -> tuple[int, float]:
        """(classes in which none of these was timed, the sum of the logarithms of what they cost the others)."""
        ratios = []
        for times in (entry.microseconds for entry in entries):
            if here := [times[config] for config in configs if config in times]:
                ratios.append(min(here) / min(times[config] for config in offered if config in times))
        return len(entries) - len(ratios), sum(map(math.log, ratios))

    return min(orders, key=cost, default=())
