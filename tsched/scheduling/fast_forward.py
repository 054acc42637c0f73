"""Many steps at once, in which nothing happens but that every running row gets a token: most steps are such.

For simulations, where a step costs nothing else. The state afterwards is the one after as many calls of schedule() and
commit(), down to which sequence has which block: blocks are asked for step by step, in the order of the rows. What
nobody gets to see is the plans in between.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np

from tsched.scheduling.policies.base import PrefixCache
from tsched.scheduling.sequence import Ints, SequenceTable
from tsched.scheduling.step_plan import NO_PAIRS, NO_ROWS, StepPlan


def count_quiet_steps(last: StepPlan, table: SequenceTable, num_available: int, most: int) -> int:
    """How many steps after `last`, in which every running row got a token, only repeat it, `most` at most: no row
    reaches its end, and `num_available` blocks suffice.
    """
    rows = last.rows
    if rows.size == 0:
        return 0
    # Step j computes the token at place ends + j - 1 and brings the one at ends + j, which makes ends + j + 1 tokens.
    count = min(most, int((table.max_length[rows] - 2 - last.ends).min()))
    if count < 1:
        return 0
    room = table.capacity[rows] - last.ends

    def wanted(steps: int) -> int:
        return int(_count_blocks(room, steps, table.block_size).sum())

    if wanted(count) > num_available:
        count = bisect_right(range(1, count + 1), num_available, key=wanted)
    return count


def skip_steps(
    last: StepPlan, table: SequenceTable, cache: PrefixCache, count: int, tokens: Ints
) -> tuple[StepPlan, Ints]:
    """Do `count` quiet steps after `last`, each of which gives row i the token `tokens[i]`.

    Returns the last step's plan, and the blocks [count] that each step took.
    """
    rows, size = last.rows, table.block_size
    room = table.capacity[rows] - last.ends
    taken = _count_blocks(room, count, size)  # [n]
    by_step = np.zeros(count, dtype=np.int64)
    grown = NO_ROWS
    if taken.any():
        row = np.repeat(np.arange(rows.size), taken)  # [b] which row a block is for
        nth = np.arange(row.size) - np.repeat(np.cumsum(taken) - taken, taken)  # [b] it is the row's nth
        step = room[row] + nth * size  # [b] in which step, from 0
        by_step = np.bincount(step, minlength=count)
        blocks = np.concatenate([cache.allocate(wanted) for wanted in by_step[by_step > 0].tolist()])
        order = np.lexsort((row, step))
        row, nth = row[order], nth[order]
        table.blocks[rows[row], table.num_blocks[rows[row]] + nth] = blocks
        table.num_blocks[rows] += taken
        table.capacity[rows] += taken * size
        grown = rows[row[step[order] == count - 1]]
    ends = last.ends + count
    places = last.ends[:, None] + np.arange(1, count + 1)  # [n, count]
    table.tokens[rows[:, None], places] = tokens[:, None]
    table.computed[rows] = ends
    table.length[rows] = table.known[rows] = ends + 1
    plan = replace(
        last,
        starts=ends - 1,
        ends=ends,
        lengths=ends,
        num_preempted=0,
        swap_outs=NO_PAIRS,
        swap_ins=NO_PAIRS,
        copies=NO_PAIRS,
        placed=NO_ROWS,
        rewritten=NO_ROWS,
        grown=grown,
    )
    return plan, by_step


def _count_blocks(room: Ints, steps: int, block_size: int) -> Ints:
    """[n] the blocks that rows with `room` [n] >= 0 free slots take in that many steps."""
    taken: Ints = np.maximum(0, -((room - steps) // block_size))
    return taken
