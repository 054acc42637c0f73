"""Two configs under which a batch-invariant variant has to give a row the same bits, as two classes of batches may."""

from itertools import combinations

from tkernels.buckets import class_axes
from tkernels.config import Config
from tkernels.variant import Variant


def crossed_config(variant: Variant, config: Config) -> Config | None:
    """A config that a call of another class may get beside this one: what may be another value is twice it, or half, as
    long as sums keep their order. None where classes change nothing, or nothing may be another value.
    """
    order = variant.sum_order
    if order is None or not class_axes(variant):
        return None
    before = config.as_dict()
    names = [*config, "num_warps"]
    crossed = config
    for some in (*((name,) for name in names), *combinations(names, 2)):
        now = crossed.as_dict()
        if any(now[name] != before[name] for name in some):
            continue
        for pins in ({name: 2 * before[name] for name in some}, {name: before[name] // 2 for name in some}):
            try:
                changed = variant.pinned(crossed, pins)
            except ValueError:
                continue  # outside of what it may be
            if order(changed) == order(config):
                crossed = changed
                break
    return crossed if crossed != config else None
