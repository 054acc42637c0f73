"""Which arms' engines are in memory at once, so that their rounds can take turns."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from experiments.arms import Arm
from experiments.engine_options import engine_options
from experiments.plan import Plan
from tmodel import kv_bytes_per_block
from tsched.cache_size import device_memory, num_kv_blocks, weight_bytes

# The rest is for activations, graphs and peers. A CPU's caches fill as they are used, and others use its memory too.
_SHARE = {"cuda": 0.9, "cpu": 0.5}


@dataclass(frozen=True)
class Seat:
    """An arm, by its index in the plan, and the cache that it gets whatever else is in memory; None where its options
    give none, which its engine will say.
    """

    index: int
    arm: Arm
    kv_cache_bytes: int | None

    @property
    def options(self) -> dict[str, Any]:
        """The scheduler's options, with the cache's size in bytes: a share would be of what other engines leave."""
        if self.kv_cache_bytes is None:
            return dict(self.arm.scheduler)
        return {**self.arm.scheduler, "kv_cache_bytes": self.kv_cache_bytes, "kv_cache_fraction": None}


def groups_of(plan: Plan, arms: Iterable[tuple[int, Arm]]) -> Iterator[list[Seat]]:
    """Arms that follow each other, as many in a group as the memory of the plan's device holds engines of, by their
    weights and caches. One whose cache is a share of all memory, as it is on a GPU by default, is a group of its own.
    """
    assert plan.model is not None
    directory, config = plan.model.directory(), plan.model.config
    weights = weight_bytes(directory, config, plan.dtype)
    total, taken = device_memory(plan.device)
    room = int(_SHARE[plan.device.type] * total) - taken
    group: list[Seat] = []
    used = 0
    for index, arm in arms:
        given = engine_options(arm.scheduler)
        longest = given["max_model_len"] or config.max_position_embeddings
        cache: int | None
        try:
            blocks = num_kv_blocks(
                directory, config, kv_cache_bytes=given["kv_cache_bytes"],
                kv_cache_fraction=given["kv_cache_fraction"], block_size=given["block_size"], dtype=plan.dtype,
                device=plan.device, max_tokens=given["max_num_seqs"] * longest,
            )  # fmt: skip
            cache = blocks * kv_bytes_per_block(config, given["block_size"], plan.dtype)
        except ValueError:
            cache = None
        size = weights + (cache or 0)
        if group and used + size > room:
            yield group
            group, used = [], 0
        group.append(Seat(index, arm, cache))
        used += size
    if group:
        yield group
