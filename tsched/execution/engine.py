"""One step of serving: the scheduler's plan, the model's logits, the sampler's tokens, back to the scheduler.

With overlap the host is one step behind the device. While step n runs, step n+1 is planned, prepared and launched: its
input tokens are those that step n leaves on the device, so nobody waits for their values. Then the host takes in step
n's tokens, and only then launches the sampling of step n+1, behind its forward. By that time penalties, logits
processors and the row's own end know every token, and no GPU idles for it as long as the host's part of a step is
shorter than the device's. What a sequence that ended at step n computes in step n+1 is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.step_inputs.contract import baseline
from tkernels.ranges import NVTX, Ranges
from tmodel.batch import Batch
from tmodel.kv_cache import CacheTensors, KVCache
from tsched.execution.batch_builder import Arranged, BatchBuilder
from tsched.execution.cuda_graphs import CudaRecorder, DecodeGraphs, EagerRecorder
from tsched.execution.device_state import DeviceState, StepInputs
from tsched.execution.engine_stats import EngineStats, PeakUse
from tsched.execution.phases import Phases
from tsched.execution.readback import HostReader, Outcome, Readback
from tsched.execution.sampler import NONE_LEFT, Sampler, TokenLogprobs
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.errors import RefusedError, RequestFault
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.stopping import should_stop
from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Sequence
from tsched.scheduling.step_plan import StepPlan

Forward = Callable[[Batch, KVCache], torch.Tensor]


class PageMover(Protocol):
    """Copies whole pages of every layer's keys and values, in the order of its calls and of the model's."""

    def swap_out(self, pages: BlockIds) -> None:
        """pages: [2, n] int32, pages of the device and where they go in the host's cache."""

    def swap_in(self, pages: BlockIds) -> None:
        """pages: [2, n] int32, pages of the host's cache and where they go on the device."""

    def copy(self, pages: BlockIds) -> None:
        """pages: [2, n] int32, pages of the device and where they go on it."""


@dataclass(eq=False, slots=True)
class Request:
    """A sequence and what its owner wants to know of it. Moments are in seconds on time.perf_counter's clock.

    `detokenizer` is there where the text must be known as it grows, because a stop string may end it.
    """

    sequence: Sequence
    arrival_time: float
    detokenizer: IncrementalDetokenizer | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    @property
    def is_watched(self) -> bool:
        """Whether each of its tokens must be looked at as it comes."""
        params = self.sequence.params
        return self.detokenizer is not None or params.logprobs is not None or bool(params.criteria)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose tokens are on their way to the host."""

    plan: StepPlan
    step: Arranged
    readback: Readback


class Engine:
    """Joins a scheduler and a model. Not for use by two threads at once.

    model     maps (Batch, caches) to logits [n, V], float32 or wider, one row for each of the batch's logit_indices
    kv_cache  per layer (k_cache, v_cache), with the scheduler's blocks and block size
    seed      of the requests that bring none
    pages     copies pages for forks and swaps, where the scheduler makes some
    states    the same of states, for swaps
    step_inputs  the op that makes a step's inputs on the device
    overlap   whether the host is one step behind the device, with the same tokens; None: where that is a GPU. May be
              changed between steps: after the next one that is off, no step is under way
    cuda_graphs  whether decode steps are recorded and replayed; None: on a GPU. On a CPU they are padded as for a
                 graph, and run
    ranges    where a step and its phases are named, the forward with the ids of its requests
    """

    def __init__(
        self,
        model: Forward,
        kv_cache: KVCache,
        scheduler: Scheduler,
        *,
        device: torch.device,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        pages: PageMover | None = None,
        states: PageMover | None = None,
        step_inputs: StepInputs = baseline,
        overlap: bool | None = None,
        cuda_graphs: bool | None = None,
        ranges: Ranges = NVTX,
    ) -> None:
        is_gpu = device.type == "cuda"
        self.scheduler = scheduler
        self.overlap = is_gpu if overlap is None else overlap
        self._phases = Phases(ranges)
        self._model = model
        self._kv_cache = kv_cache
        self._pages = pages
        self._states = states
        self._state = DeviceState(scheduler.table, device, step_inputs)
        self._builder = BatchBuilder(scheduler.table, self._state)
        self._sampler = Sampler(scheduler.table, seed=seed, eos_token_ids=eos_token_ids)
        self._reader = HostReader(device)
        self._launched: _Launched | None = None  # the step under way that has not been committed
        self._graphs: DecodeGraphs | None = None
        if is_gpu if cuda_graphs is None else cuda_graphs:
            recorder = CudaRecorder(device, ranges) if is_gpu else EagerRecorder()
            rows, longest = scheduler.table.num_rows, scheduler.max_model_len
            self._graphs = DecodeGraphs(
                model, kv_cache, self._state, recorder, max_rows=rows, max_model_len=longest,
                num_states=scheduler.states.pool.num_blocks if scheduler.states is not None else 0, ranges=ranges,
            )  # fmt: skip
        self._requests: dict[int, Request] = {}
        self._num_watched = 0  # unfinished requests whose tokens are looked at as they come
        self._num_unbegun = 0  # and those without a token yet
        self._peak = PeakUse()

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add(
        self,
        request_id: int,
        prompt: Items[int],
        params: SamplingParams,
        *,
        detokenizer: IncrementalDetokenizer | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> Request:
        """Queue a request for `prompt` [n] token ids; RefusedError where it could never finish here.

        `detokenizer` comes with a request that has stop strings, to find them. The rest is Scheduler.add's.
        """
        return self.add_group(
            [request_id],
            prompt,
            [params],
            detokenizers=[detokenizer],
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )[0]

    def add_group(
        self,
        request_ids: Items[int],
        prompt: Items[int],
        params: Items[SamplingParams],
        *,
        detokenizers: Items[IncrementalDetokenizer | None],
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> list[Request]:
        """Queue a request for each of `params`, all of one `prompt`, which is computed once. Else as `add`."""
        for one, detokenizer in zip(params, detokenizers, strict=True):
            if one.stop_strings and detokenizer is None:
                raise RefusedError("stop strings are looked for in text, and there is no tokenizer to make it")
        sequences = self.scheduler.add_group(request_ids, prompt, params, priority=priority, cache_salt=cache_salt)
        arrival = time.perf_counter() if arrival_time is None else arrival_time
        return [self._enlist(Request(s, arrival, d)) for s, d in zip(sequences, detokenizers, strict=True)]

    def fork(self, request_id: int, new_id: int, params: SamplingParams, *, num_tokens: int) -> Request:
        """Queue a request that goes on from the first `num_tokens` tokens of an unfinished one, see Scheduler.fork. It
        finds no stop strings.
        """
        return self._enlist(
            Request(self.scheduler.fork(request_id, new_id, params, num_tokens=num_tokens), time.perf_counter())
        )

    def _enlist(self, request: Request) -> Request:
        self._requests[request.sequence.id] = request
        self._num_watched += request.is_watched
        self._num_unbegun += 1
        return request

    def abort(self, sequence_id: int) -> Request | None:
        """End a request wherever it is; None where there is no such request."""
        if self.scheduler.abort(sequence_id) is None:
            return None
        request = self._requests[sequence_id]
        self._forget(request, time.perf_counter())
        if self._launched is not None and not self._requests:  # nobody waits for the step under way
            self._settle(self._launched)
        return request

    def step(self) -> list[Request]:
        """Advance every sequence that can advance; returns the requests that finished, with overlap those that the
        step before finished.

        Raises what the model raises; every request is aborted then, because what the caches hold is not known any more.
        """
        try:
            with self._phases.step:
                return self._step()
        except BaseException:
            self._launched = None
            self.scheduler.abort_all()
            self._requests.clear()
            self._num_watched = self._num_unbegun = 0
            raise

    def forget_graphs(self) -> None:
        """Record decode steps anew when they are next wanted: a profiler that began after they were recorded knows
        nothing of what is in them.
        """
        if self._graphs is not None:
            self._graphs.forget()

    def stats(self) -> EngineStats:
        cache = self._kv_cache
        of_blocks = cache.blocks if isinstance(cache, CacheTensors) else [one for layer in cache for one in layer]
        kv_bytes = sum(tensor.nbytes for tensor in of_blocks)
        return EngineStats.of(self.scheduler, self._peak, kv_bytes)

    def reset_peak(self) -> None:
        """The peaks in `stats` are of what comes from now on."""
        self._peak.reset()

    def _step(self) -> list[Request]:
        finished: list[Request] = []
        if self._launched is not None and not self.overlap:  # it has just been switched off
            finished = self._settle(self._launched)
        phases = self._phases
        with phases.schedule:
            plan = self.scheduler.schedule()
            self._peak.note(self.scheduler)
        launched = self._launched
        with phases.prepare:
            self._move_pages(plan)
            if plan.placed.size:
                self._sampler.forget(plan.placed)
            step = self._builder.arrange(plan)
        if step is None:
            if launched is None and self._requests:  # by the scheduler's promise this cannot be; a loop would not end
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can advance")
            if launched is not None:
                finished += self._settle(launched)
            self.scheduler.commit(plan, plan.sampled)
            return finished
        with torch.inference_mode():
            with phases.forward.carrying(self._request_ids(plan)) if phases.listening else phases.forward:
                logits = self._forward(step)
            if launched is not None:
                finished += self._settle(launched)
            with phases.sample:
                rows, lengths, epochs = step.sampled_rows, step.lengths, step.sampled_epochs
                nobody_left = self.scheduler.table.num_departures == plan.num_departures
                sampled = self._sampler.sample(logits, rows, lengths, None if nobody_left else epochs)
                self._state.keep_tokens(rows, lengths, epochs, sampled.token_ids)
                self._launched = _Launched(plan, step, self._reader.start(sampled))
        if self.overlap and self._requests:
            return finished
        return finished + self._settle(self._launched)

    def _forward(self, step: Arranged) -> torch.Tensor:
        """Logits [m, V] of the step's sampled rows."""
        if self._graphs is not None and step.all_decode:
            return self._graphs.run(step.rows, step.starts, step.state_slots)
        return self._model(self._builder.build(step), self._kv_cache)

    def _request_ids(self, plan: StepPlan) -> list[int]:
        """Of the requests that advance in a step, in the order of its rows."""
        sequences = (self.scheduler.table.sequences[row] for row in plan.rows.tolist())
        return [sequence.id for sequence in sequences if sequence is not None]

    def _move_pages(self, plan: StepPlan) -> None:
        """Copy pages and states as the plan asks, before its forward and in this order."""
        if not (plan.swap_outs.size or plan.swap_ins.size or plan.copies.size):  # no state moves without pages
            return
        if self._pages is None:
            raise RuntimeError("the plan copies pages, and the engine was made without a way to")
        _carry_out(self._pages.swap_out, plan.swap_outs)
        _carry_out(self._pages.swap_in, plan.swap_ins)
        _carry_out(self._pages.copy, plan.copies)
        if plan.states is not None and self._states is not None:
            _carry_out(self._states.swap_out, plan.states.swap_outs)
            _carry_out(self._states.swap_in, plan.states.swap_ins)

    def _settle(self, launched: _Launched) -> list[Request]:
        """Wait for a step's tokens and hand them to the scheduler; returns the requests that finished."""
        self._launched = None
        with self._phases.wait:
            outcome = launched.readback()
        with self._phases.commit:
            return self._commit(launched, outcome)

    def _commit(self, launched: _Launched, outcome: Outcome) -> list[Request]:
        plan, step, tokens = launched.plan, launched.step, outcome.token_ids
        # By entry, looked up before the commit takes out those that end.
        begun = self._requests_of(step) if self._num_unbegun else {}
        broken = {} if outcome.all_chosen else self._requests_of(step, tokens < 0)
        watched = self._requests_of(step, tokens >= 0) if self._num_watched else {}

        in_plan = tokens
        if step.order is not None:
            in_plan = np.empty_like(tokens)
            in_plan[step.order] = tokens
        finished = [self._requests[sequence.id] for sequence in self.scheduler.commit(plan, in_plan)]
        now = time.perf_counter()
        for request in begun.values():
            if request.first_token_time is None:
                request.first_token_time = now
                self._num_unbegun -= 1
        for entry, request in watched.items():
            if request.is_watched:
                length = int(step.lengths[entry]) + 1
                self._check_token(request, int(tokens[entry]), length, outcome.logprobs.get(entry), finished)
        for entry, request in broken.items():
            self._break_off(request, int(tokens[entry]), outcome.faults.get(entry), finished)
        for request in finished:
            self._forget(request, now)
        return finished

    def _requests_of(self, step: Arranged, wanted: NDArray[np.bool_] | None = None) -> dict[int, Request]:
        """By entry among the sampled, the requests whose rows have not changed hands since the plan; the `wanted` [m]
        ones, or all.
        """
        table, rows = self.scheduler.table, step.sampled_rows
        live = table.epoch[rows] == step.sampled_epochs
        requests = {}
        for entry in np.flatnonzero(live if wanted is None else live & wanted).tolist():
            sequence = table.sequences[rows[entry]]
            if sequence is not None:
                requests[entry] = self._requests[sequence.id]
        return requests

    def _check_token(
        self, request: Request, token: int, length: int, logprobs: TokenLogprobs | None, finished: list[Request]
    ) -> None:
        """Keep a new token's log-probabilities, and end its request where its text now has a stop string, or where one
        of its stopping criteria says so.
        """
        if logprobs is not None:
            request.logprobs.append(logprobs)
        sequence = request.sequence
        may_stop = length - sequence.prompt_len > sequence.params.min_tokens
        reason = None
        if may_stop and sequence.params.criteria and sequence.finish_reason is None:
            known = sequence.freeze_tokens(self.scheduler.table.tokens[sequence.row, :length])
            try:
                stops = should_stop(
                    sequence.params.criteria, known[: sequence.prompt_len], known[sequence.prompt_len :]
                )
                reason = "stop" if stops else None
            except RequestFault as fault:
                reason, request.error = "error", str(fault)
        detokenizer = request.detokenizer
        if detokenizer is not None:
            detokenizer.append(token, may_stop=may_stop)
            if detokenizer.is_stopped and reason is None:
                reason = "stop"
        if reason is not None and self.scheduler.finish(sequence.id, reason) is not None:
            finished.append(request)

    def _break_off(self, request: Request, token: int, fault: str | None, finished: list[Request]) -> None:
        """End a request that got `token` < 0, which is none: by the `fault` of a logits processor, or see Sampled."""
        sequence = request.sequence
        if self.scheduler.finish(sequence.id, "error") is not None:
            finished.append(request)
        sequence.tokens = sequence.tokens[:-1]
        sequence.finish_reason = "error"
        place = f"output token {sequence.tokens.size - sequence.prompt_len}"
        if token == NONE_LEFT:
            why = f"processors, penalties and min_tokens together left no finite logit to choose {place} from"
        else:
            at_fault = "a kernel, the weights or the dtype's range is at fault"
            why = f"the model's logits for {place} are not finite: {at_fault}"
        request.error = fault or why

    def _forget(self, request: Request, now: float) -> None:
        """The request has finished: settle its text and its accounts."""
        del self._requests[request.sequence.id]
        self._num_watched -= request.is_watched
        self._num_unbegun -= request.first_token_time is None
        request.finish_time = now
        if request.detokenizer is not None:
            request.detokenizer.finish()
            if request.detokenizer.is_stopped and request.error is None:
                # The last token may have allowed "length" too; the text decides.
                request.sequence.finish_reason = "stop"


def _carry_out(move: Callable[[BlockIds], None], pairs: BlockIds) -> None:
    if pairs.size:
        move(pairs)
