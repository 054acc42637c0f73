"""The loop: requests arrive, the scheduler plans, the clock goes on by the plan's time, the plan is committed.

Every step is the scheduler's own schedule() and commit(); steps that only repeat the last one until somebody comes or
ends are its own too, many at once, with the state of so many calls. Time in which nobody is there is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from experiments.simulation.metrics import Arrived, Metrics
from experiments.simulation.step_time import StepTime, Work
from experiments.simulation.traces import OUTPUT_TOKENS, Request
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Ints
from tsched.scheduling.step_plan import StepPlan

_SPAN = 16  # steps, at least, whose mean goes into the levels over time; sums and peaks are exact
_MOST_SKIPPED = 256  # steps at once


@lru_cache(maxsize=4096)
def _params_of(output_len: int) -> SamplingParams:
    """Greedy, to the length that the trace tells; parameters are checked as they are made, so they are kept."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


class Replay:
    """Drives `scheduler` with `requests`, which come in the order of arrival.

    lookahead: requests that wait inside the scheduler at most, None for all that have arrived. The others wait outside,
    without their tokens. First come, first served looks at the head of the queue alone, and no step admits more than
    its rows, so a lookahead of that many changes nothing; an order that looks further needs None.
    """

    def __init__(
        self, scheduler: Scheduler, requests: Iterator[Request], step_time: StepTime, *, lookahead: int | None
    ) -> None:
        self.metrics = Metrics(scheduler.pool.block_size)
        self._scheduler = scheduler
        self._requests = requests
        self._step_time = step_time
        self._lookahead = lookahead
        self._next = next(requests, None)
        self._here: dict[int, Arrived] = {}  # unfinished, in the scheduler
        self._row_epochs = np.full(scheduler.table.num_rows, -1, dtype=np.int64)
        self._last: StepPlan | None = None
        self._context = 0  # tokens of context in the last step, summed over its rows
        self._span_start = 0.0
        self._used_area = self._running_area = 0.0

    def run(self, on_progress: Callable[[int], None] = lambda finished: None) -> Metrics:
        """Until every request has finished. RuntimeError where the scheduler stands still although somebody waits."""
        metrics, steps = self.metrics, 0
        while True:
            self._feed()
            if not self._here:
                self._end_span()
                if self._next is None:
                    break
                metrics.idle_seconds += self._next.arrival - metrics.clock
                metrics.clock = self._next.arrival
                self._end_span()  # of nothing
                continue
            steps += self._skip() or self._step()
            if steps >= _SPAN:
                steps = 0
                self._end_span()
                on_progress(metrics.num_finished + metrics.num_refused)
        on_progress(metrics.num_finished + metrics.num_refused)
        return metrics

    def _feed(self) -> None:
        """Hand the scheduler what has arrived by now, as far as the lookahead goes."""
        scheduler, metrics = self._scheduler, self.metrics
        while self._next is not None and self._next.arrival <= metrics.clock:
            if self._is_full():
                return
            request = self._next
            self._next = next(self._requests, None)
            metrics.num_requests += 1
            try:
                params = _params_of(request.output_len)
                scheduler.add(request.id, request.prompt(), params, priority=request.priority)
            except RefusedError:
                metrics.num_refused += 1
                continue
            self._here[request.id] = Arrived(request.arrival, request.input_len)

    def _step(self) -> int:
        """One step; returns 1."""
        scheduler, metrics = self._scheduler, self.metrics
        plan = scheduler.schedule()
        if plan.is_empty:
            raise RuntimeError(f"{len(self._here)} requests are unfinished and the plan is empty")
        window = scheduler.window
        work = Work.of(plan, None if window is None else window.size)
        seconds = self._step_time.step(work)
        swapped, copied = plan.swap_outs.shape[1] + plan.swap_ins.shape[1], plan.copies.shape[1]
        if swapped or copied:
            states = 0 if plan.states is None else plan.states.swap_outs.shape[1] + plan.states.swap_ins.shape[1]
            seconds += self._step_time.copies(swapped, copied, states)
        metrics.clock += seconds
        metrics.busy_seconds += seconds
        used, running = scheduler.pool.num_referenced, scheduler.num_running
        metrics.peak_used = max(metrics.peak_used, used)
        metrics.peak_running = max(metrics.peak_running, running)
        self._used_area += used * seconds
        self._running_area += running * seconds
        lent, filled = int(scheduler.table.capacity[plan.rows].sum()), work.num_context
        if window is not None:
            given_back = int(scheduler.table.first_block[plan.rows].sum()) * window.block_size
            lent, filled = lent - given_back, int(plan.ends.sum()) - given_back
        metrics.lent_slot_seconds += lent * seconds
        metrics.filled_slot_seconds += filled * seconds
        self._last, self._context = plan, work.num_context
        self._note_starts(plan)
        for sequence in scheduler.commit(plan, self._tokens_of(plan)):
            request = self._here.pop(sequence.id)
            metrics.finish(request, sequence.tokens.size - sequence.prompt_len, metrics.clock)
        return 1

    def _skip(self) -> int:
        """The steps that only repeat the last one, until a request comes; returns how many they were, maybe 0."""
        scheduler, metrics, last = self._scheduler, self.metrics, self._last
        count = scheduler.quiet_steps(_MOST_SKIPPED)
        if count < 2 or last is None:
            return 0
        num_rows = last.rows.size
        seconds = self._step_time.decodes(num_rows, self._context + num_rows, count)
        clocks = np.add.accumulate(np.concatenate(([metrics.clock], seconds)))  # sums from the left, as one by one
        if self._next is not None and not self._is_full():
            count = min(count, int(np.searchsorted(clocks, self._next.arrival)))
            seconds = seconds[:count]
        used = scheduler.pool.num_referenced + np.cumsum(scheduler.skip_steps(count, self._tokens_of(last)))
        busy = float(seconds.sum())
        lent = int(scheduler.table.capacity[last.rows].sum()) + (used - used[-1]) * scheduler.pool.block_size
        metrics.clock = float(clocks[count])
        metrics.busy_seconds += busy
        metrics.peak_used = max(metrics.peak_used, int(used[-1]))
        self._used_area += float(used @ seconds)
        self._running_area += num_rows * busy
        metrics.lent_slot_seconds += float(lent @ seconds)
        metrics.filled_slot_seconds += float((self._context + num_rows * np.arange(1, count + 1)) @ seconds)
        self._context += num_rows * count
        return count

    def _tokens_of(self, plan: StepPlan) -> Ints:
        """[m] int64: equal within one row's one tenancy, and nobody else's, so that outputs are shared by no one."""
        return plan.sampled_epochs * self._scheduler.table.num_rows + plan.sampled_rows + OUTPUT_TOKENS

    def _is_full(self) -> bool:
        return self._lookahead is not None and self._scheduler.num_waiting >= self._lookahead

    def _end_span(self) -> None:
        """Put the levels since the last call into the metrics."""
        metrics, end = self.metrics, self.metrics.clock
        seconds = end - self._span_start
        if seconds > 0:
            metrics.used.add(end, self._used_area)
            metrics.running.add(end, self._running_area)
            metrics.cached.add(end, self._scheduler.pool.num_cached * seconds)
        self._span_start = end
        self._used_area = self._running_area = 0.0

    def _note_starts(self, plan: StepPlan) -> None:
        """Requests that this plan admits for the first time, and those that it gives their first token."""
        table, rows = self._scheduler.table, plan.rows
        is_new = self._row_epochs[rows] != table.epoch[rows]
        if is_new.any():
            self._row_epochs[rows] = table.epoch[rows]
            for i in np.flatnonzero(is_new).tolist():
                request = self._request_in(int(rows[i]))
                if not request.started:
                    self.metrics.start(request, int(plan.starts[i]))
        is_first = plan.lengths == table.prompt_len[plan.sampled_rows]
        if is_first.any():
            for row in plan.sampled_rows[is_first].tolist():
                request = self._request_in(row)
                if request.first_token is None:
                    self.metrics.first_token(request, self.metrics.clock)

    def _request_in(self, row: int) -> Arrived:
        sequence = self._scheduler.table.sequences[row]
        if sequence is None:
            raise RuntimeError(f"row {row} of a plan that was just made is empty")
        return self._here[sequence.id]
