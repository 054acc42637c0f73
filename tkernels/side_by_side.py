"""Works of foreign code at the same time, each in a process of its own whose children are counted and ended with it.

Those that hang wait for their time-out together.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from tkernels.cores import usable_cores
from tkernels.isolation import Child, Ending, Tell, Work, adopt_orphans, end_children, run_forked

_YOUNG_S = 2.0
"""A work that has run so long takes no core's place any more: most end sooner, and one that hangs keeps nobody."""
_MOST = 64
"""Of works at a time, however many hang."""
_GRACE_S = 10.0
"""That a keeper has beyond its work's time-out: it needs none of it, unless the work has stopped it."""
_POLL_S = 0.005


def run_side_by_side(
    works: Sequence[Work], hear: Callable[[int, Any], None], timeout: float, memory: float = math.inf
) -> list[Ending]:
    """Runs each work in a fork of a fork of this process.

    Args:
        works: They begin in order, as many at a time as there are cores beside those that take long.
        hear: Takes a work's number, and what it tells.
        timeout: Seconds that each has from its own beginning.
        memory: Bytes that each may hold, counted with what it shares with this process.
    """
    endings: dict[int, Ending] = {}
    waiting, running = deque(enumerate(works)), dict[int, Child]()

    def begin(number: int, work: Work) -> Child:
        def take(message: Any) -> None:
            kind, value = message
            if kind == "ended":
                endings[number] = Ending(**value)
            else:
                hear(number, value)

        return Child(_keeper_of(work, timeout, memory), take, timeout + _GRACE_S)

    try:
        while waiting or running:
            now = time.monotonic()
            places = usable_cores() - sum(now - child.began < _YOUNG_S for child in running.values())
            for _ in range(min(places, _MOST - len(running), len(waiting))):
                number, work = waiting.popleft()
                running[number] = begin(number, work)
            for number, child in list(running.items()):
                if not child.goes_on(0.0):
                    del running[number]
                    child.kill()
                    endings[number] = endings.get(number) or child.ending()
            time.sleep(_POLL_S)
    finally:
        for child in running.values():
            child.kill()
    return [endings[number] for number in range(len(works))]


def _keeper_of(work: Work, timeout: float, memory: float) -> Work:
    """What runs a work in a child of its own, and ends all that this leaves behind."""

    def keep(tell: Tell) -> None:
        def work_alone(tell_of_work: Tell) -> None:
            tell.leave()
            work(tell_of_work)

        adopt_orphans()
        ending = run_forked(work_alone, lambda message: tell(["message", message]), timeout, memory)
        tell(["ended", {**asdict(ending), "left": end_children()}])

    return keep
