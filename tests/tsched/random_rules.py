"""Rules of a ServingWorld, fired at random: a million steps in minutes, which hypothesis would take hours for.

    python -m tests.tsched.random_rules --steps 1000000 --seed 0

prints how often each rule fired and what came of it. A failure prints the seed of its world: `--seed` with that number
and `--worlds 1` runs the same rules again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.tsched.page_contents import VOCAB
from tests.tsched.serving_world import MAX_MODEL_LEN, SALTS, ServingWorld
from tsched.scheduling.policies import ORDERS, PREEMPTIONS, PREFIX_CACHES

STEPS_A_WORLD = 250


def random_options(rng: random.Random) -> dict[str, Any]:
    """A scheduler's, most of them short of blocks."""
    block_size = rng.choice([1, 2, 4, 4])
    chunked = rng.random() < 0.85
    return {
        "num_blocks": rng.randint(16, 48) // block_size,
        "block_size": block_size,
        "num_host_blocks": rng.choice([0, 8, 40]) // block_size,
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.randint(1, 20) if chunked else MAX_MODEL_LEN + rng.randint(0, 9),
        "max_chunk_tokens": rng.choice([None, 1, 3, 8]) if chunked else None,
        "decode_share": rng.choice([0.0, 0.3]) if chunked else 0.0,
        "chunked_prefill": chunked,
        "order": rng.choice(sorted(ORDERS)),
        "preemption": rng.choice(["swap", *sorted(PREEMPTIONS)]),
        "prefix_cache": rng.choice(["hash", "radix", *sorted(PREFIX_CACHES)]),
    }


def random_states(rng: random.Random) -> dict[str, Any]:
    """A scheduler's whose layers keep states, most of them short of slots."""
    return {
        "num_states": rng.randint(2, 14),
        "num_host_states": rng.choice([0, 2, 10]),
        "state_interval": rng.choice([1, 1, 2, 3]),
    }


def random_window(rng: random.Random) -> dict[str, Any]:
    """A scheduler's whose layers have a window, in a pool that is short of blocks for it."""
    return {"window": rng.choice([2, 3, 5, 8, 13]), "num_blocks": rng.randint(5, 30)}


def _arrive(world: ServingWorld, rng: random.Random) -> None:
    own = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(4))]
    world.arrive(
        stem=rng.randrange(2),
        stem_len=rng.randrange(20),
        own=own,
        salt=rng.choice([0, 0, 0, 1, 2]),
        priority=rng.randint(-1, 1),
        group=rng.choice([1, 1, 1, 2, 3]),
        max_tokens=rng.randint(1, 18),
        eos=rng.random() < 0.3,
    )


def _come_back(world: ServingWorld, rng: random.Random) -> None:
    own = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(3))]
    world.come_back(rng.randrange(100), own, rng.randrange(len(SALTS)) if rng.random() < 0.2 else 0, rng.randint(1, 8))


def _fork(world: ServingWorld, rng: random.Random) -> None:
    num_tokens = rng.randrange(100) if rng.random() < 0.5 else None
    world.fork(rng.randrange(100), num_tokens, rng.randint(1, 18), rng.random() < 0.3)


# By how often each is drawn.
RULES: list[tuple[int, Callable[[ServingWorld, random.Random], None]]] = [
    (300, lambda world, rng: world.schedule()),
    (300, lambda world, rng: world.commit()),
    (60, _arrive),
    (20, _come_back),
    (30, lambda world, rng: world.abort(rng.randrange(100))),
    (40, _fork),
    (50, lambda world, rng: world.replace_last(rng.randrange(100), rng.randrange(1, VOCAB))),
    (2, lambda world, rng: world.lose_a_step()),
    (2, lambda world, rng: world.run_out_of_memory()),
    (1, lambda world, rng: world.lose_the_tokens()),
]
_WEIGHTS = [weight for weight, _ in RULES]
_ACTIONS = [action for _, action in RULES]
MAX_ALIVE = 14


def run_world(
    seed: int,
    fired: Counter[str],
    num_steps: int = STEPS_A_WORLD,
    *,
    more_options: Callable[[random.Random], dict[str, Any]] | None = None,
) -> int:
    """Fire `num_steps` rules in a world of `seed`, check after each, and wind up; the steps done, wind-up included."""
    rng = random.Random(seed)
    options = random_options(rng)
    if more_options is not None:
        options |= more_options(rng)
    world = ServingWorld(fired, **options)
    try:
        for action in rng.choices(_ACTIONS, _WEIGHTS, k=num_steps):
            if action in (_arrive, _come_back, _fork) and len(world.alive) >= MAX_ALIVE:
                continue
            action(world, rng)
            world.check()
        world.wind_up()
    except Exception as error:
        error.add_note(f"in the world of seed {seed}, {options}; after {world.num_checks} steps")
        raise
    return world.num_checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--worlds", type=int, help="so many worlds, and not so many steps")
    parser.add_argument("--seed", type=int, default=0, help="of the first world; the next one's is one more")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--states", action="store_const", const=random_states, help="layers keep states beside pages")
    kinds.add_argument("--windows", action="store_const", const=random_window, help="all layers have a window")
    arguments = parser.parse_args()
    fired: Counter[str] = Counter()
    began, num_steps, num_worlds = time.perf_counter(), 0, 0
    while num_worlds < arguments.worlds if arguments.worlds is not None else num_steps < arguments.steps:
        num_steps += run_world(arguments.seed + num_worlds, fired, more_options=arguments.states or arguments.windows)
        num_worlds += 1
    seconds = time.perf_counter() - began
    print(f"{num_steps:,} steps in {num_worlds:,} worlds, each checked, no violation; {seconds:.0f} s")
    for name, times in sorted(fired.items()):
        print(f"{times:>12,}  {name}")


if __name__ == "__main__":
    main()
