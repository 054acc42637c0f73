"""One step of serving: the scheduler's plan, the model's logits, the sampler's tokens, back to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import nvtx
import torch

from tmodel.batch import Batch
from tmodel.kv_cache import KVCache
from tsched.batch_builder import BatchBuilder
from tsched.detokenizer import IncrementalDetokenizer
from tsched.logits_processors import RequestFault
from tsched.sampler import NOT_FINITE, Sampled, Sampler, TokenLogprobs
from tsched.sampling_params import SamplingParams
from tsched.scheduler import RefusedError, Scheduler, StepPlan
from tsched.sequence import Ints, Sequence
from tsched.stopping import is_met

Forward = Callable[[Batch, KVCache], torch.Tensor]


class _Range:
    """An NVTX range of one name, made once: making its attributes costs more than the range."""

    __slots__ = ("_attributes",)
    _domain = nvtx.get_domain("tsched")

    def __init__(self, name: str) -> None:
        self._attributes = self._domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *exception: object) -> None:
        self._domain.pop_range()


_SCHEDULE, _PREPARE, _FORWARD, _SAMPLE, _COMMIT = map(_Range, ("schedule", "prepare", "forward", "sample", "commit"))


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
class EngineStats:
    """Sums since the engine was made, and the pool as it is and as it was when most of it was lent."""

    num_steps: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_finished: int
    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    num_used_blocks: int
    peak_used_blocks: int
    peak_occupancy: float  # of all blocks, the fraction lent at the peak
    last_page_waste: float  # of the slots lent at the peak, the fraction past their sequences' ends


class Engine:
    """Joins a scheduler and a model. Not for use by two threads at once.

    model     maps (Batch, caches) to logits [n, V], float32 or wider, one row for each of the batch's logit_indices
    kv_cache  per layer (k_cache, v_cache), with the scheduler's blocks and block size
    seed      of the requests that bring none
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
    ) -> None:
        self.scheduler = scheduler
        self._model = model
        self._kv_cache = kv_cache
        self._builder = BatchBuilder(scheduler.table, device)
        self._sampler = Sampler(scheduler.table, seed=seed, eos_token_ids=eos_token_ids)
        self._requests: dict[int, Request] = {}
        self._num_watched = 0  # unfinished requests whose tokens are looked at as they come
        self._num_unbegun = 0  # and those without a token yet
        self._peak_used = 0
        self._waste_at_peak = 0.0

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
        cache_salt: bytes = b"",
    ) -> Request:
        """Queue a request for `prompt` [n] token ids; RefusedError where it could never finish here.

        `detokenizer` comes with a request that has stop strings, to find them.
        """
        if params.stop_strings and detokenizer is None:
            raise RefusedError("stop strings are looked for in text, and there is no tokenizer to make it")
        sequence = self.scheduler.add(request_id, prompt, params, cache_salt=cache_salt)
        arrival = time.perf_counter() if arrival_time is None else arrival_time
        request = Request(sequence, arrival, detokenizer)
        self._requests[request_id] = request
        self._num_watched += request.is_watched
        self._num_unbegun += 1
        return request

    def abort(self, sequence_id: int) -> Request | None:
        """End a request wherever it is; None where there is no such request."""
        if self.scheduler.abort(sequence_id) is None:
            return None
        request = self._requests[sequence_id]
        self._forget(request, time.perf_counter())
        return request

    def step(self) -> list[Request]:
        """Advance every sequence that can advance; returns the requests that finished.

        Raises what the model raises; every request is aborted then, because what the caches hold is not known any more.
        """
        try:
            return self._step()
        except BaseException:
            self.scheduler.abort_all()
            self._requests.clear()
            self._num_watched = self._num_unbegun = 0
            raise

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        counters, pool = scheduler.counters, scheduler.pool
        return EngineStats(
            num_steps=counters.num_steps,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_decode_tokens=counters.num_decode_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_preemptions=counters.num_preemptions,
            num_finished=counters.num_finished,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            num_used_blocks=pool.num_referenced,
            peak_used_blocks=self._peak_used,
            peak_occupancy=self._peak_used / pool.num_blocks,
            last_page_waste=self._waste_at_peak,
        )

    def _step(self) -> list[Request]:
        with _SCHEDULE:
            plan = self.scheduler.schedule()
            self._note_peak()
        if plan.is_empty:
            if self._requests:  # by the scheduler's promise this cannot be; a caller's loop would never end
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can advance")
            self.scheduler.commit(plan, plan.sampled)
            return []
        with _PREPARE:
            batch = self._builder.build(plan)
        with torch.inference_mode():
            with _FORWARD:
                logits = self._model(batch, self._kv_cache)
            with _SAMPLE:
                sampled = self._sampler.sample(logits, plan.sampled_rows, plan.lengths)
        with _COMMIT:
            return self._commit(plan, sampled)

    def _note_peak(self) -> None:
        used = self.scheduler.pool.num_referenced
        if used > self._peak_used:
            self._peak_used = used
            self._waste_at_peak = self.scheduler.last_page_waste()

    def _commit(self, plan: StepPlan, sampled: Sampled) -> list[Request]:
        """Hand the tokens to the scheduler; returns the requests that finished."""
        tokens, rows = sampled.token_ids, plan.sampled_rows
        begun = self._requests_in(rows) if self._num_unbegun else []
        broken = [] if sampled.all_finite else self._broken(rows, sampled)
        watched = self._requests_in(rows) if self._num_watched else []

        finished = [self._requests[sequence.id] for sequence in self.scheduler.commit(plan, tokens)]
        now = time.perf_counter()
        for request in begun:
            if request.first_token_time is None:
                request.first_token_time = now
                self._num_unbegun -= 1
        for entry, request in enumerate(watched):
            if request.is_watched and tokens[entry] != NOT_FINITE:
                self._look_at(
                    request, int(tokens[entry]), int(plan.lengths[entry]) + 1, sampled.logprobs.get(entry), finished
                )
        for request, fault in broken:
            self._break_off(request, fault, finished)
        for request in finished:
            self._forget(request, now)
        return finished

    def _requests_in(self, rows: Ints) -> list[Request]:
        sequences = self.scheduler.table.sequences
        return [self._requests[sequence.id] for row in rows.tolist() if (sequence := sequences[row]) is not None]

    def _broken(self, rows: Ints, sampled: Sampled) -> list[tuple[Request, str | None]]:
        """The requests that got no token, with what their logits processors did, where those are at fault."""
        entries = np.flatnonzero(sampled.token_ids == NOT_FINITE)
        requests = self._requests_in(rows[entries])
        return [(request, sampled.faults.get(entry)) for request, entry in zip(requests, entries.tolist(), strict=True)]

    def _look_at(
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
            known = self.scheduler.table.tokens[sequence.row, :length]
            known.flags.writeable = False
            try:
                stops = is_met(sequence.params.criteria, known[: sequence.prompt_len], known[sequence.prompt_len :])
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

    def _break_off(self, request: Request, fault: str | None, finished: list[Request]) -> None:
        """End a request that got no token: by the `fault` of a logits processor, or its logits were not finite."""
        sequence = request.sequence
        if self.scheduler.finish(sequence.id, "error") is not None:
            finished.append(request)
        sequence.tokens = sequence.tokens[:-1]
        sequence.finish_reason = "error"
        request.error = fault or (
            f"the model's logits for output token {sequence.tokens.size - sequence.prompt_len} are not finite: "
            "a kernel, the weights or the dtype's range is at fault"
        )

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
