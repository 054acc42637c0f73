"""One step of serving: the scheduler plans, the model computes logits, the sampler chooses tokens, the plan commits.

With overlap the host is one step behind the device. While step n runs, the host plans, prepares and launches step n+1,
whose input tokens stay on the device, so the host need not wait for their values. Then the host commits step n's tokens
and launches the sampling of step n+1 after its forward. So penalties, logits processors and stop conditions know every
token, and the GPU does not idle as long as the host's part of a step is shorter than the device's. Tokens that step n+1
computes for a sequence that ended at step n are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.step_inputs.contract import baseline
from tkernels.ranges import NVTX, Ranges
from tmodel.batch import Batch
from tmodel.kv_cache import CacheTensors, KVCache
from tsched.execution.batch_builder import ArrangedPlan, BatchBuilder
from tsched.execution.cuda_graphs import CudaRecorder, DecodeGraphs, EagerRecorder
from tsched.execution.device_state import DeviceState, StepInputs
from tsched.execution.engine_stats import EngineStats, PeakUse
from tsched.execution.exhaustion import explain_exhaustion
from tsched.execution.phases import Phases
from tsched.execution.prompt_logprobs import PromptScorer, PromptScores, ScoredPrompts, compute_with_prompts
from tsched.execution.readback import HostReader, Outcome, Readback
from tsched.execution.request import Request
from tsched.execution.sampler import NONE_LEFT, Sampler, TokenLogprobs
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.errors import RefusedError, RequestFault
from tsched.requests.first_token import name_barring_parameters
from tsched.requests.grammar import Grammar, GrammarState
from tsched.requests.sampling_params import SamplingParams
from tsched.requests.stopping import should_stop
from tsched.scheduling.block_pool import BlockIds
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Ints
from tsched.scheduling.step_plan import StepPlan

_AT_FAULT = "a kernel, the weights or the dtype's range is at fault"
_PROMPT_NOT_FINITE = f"the model's logits for the prompt's tokens are not finite: {_AT_FAULT}"

Forward = Callable[[Batch, KVCache], torch.Tensor]


class PageMover(Protocol):
    """Copies whole pages of every layer's keys and values. Its copies and the model's forwards run in call order."""

    def swap_out(self, pages: BlockIds) -> None:
        """Copies pages of the device, pages[0], to the host's cache, pages[1]; [2, n] int32."""

    def swap_in(self, pages: BlockIds) -> None:
        """Copies pages of the host's cache, pages[0], to the device, pages[1]; [2, n] int32."""

    def copy(self, pages: BlockIds) -> None:
        """Copies pages of the device, pages[0], to others of it, pages[1]; [2, n] int32."""


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that the device runs, whose tokens the host has not read yet."""

    plan: StepPlan
    step: ArrangedPlan
    readback: Readback
    store_prompts: Callable[[], None] | None


class Engine:
    """Joins a scheduler and a model. Not for use by two threads at once.

    Args:
        model: Maps (Batch, caches) to logits [n, V], float32 or wider, one row for each of the batch's logit_indices.
        kv_cache: The caches of each layer, with the scheduler's blocks and block size.
        scheduler: Plans the steps.
        device: Where the model runs.
        seed: Of requests without a seed.
        eos_token_ids: The tokens that end a sequence.
        pages: Copies pages for forks and swaps; needed where the scheduler makes any.
        states: Copies states for swaps.
        step_inputs: The op that makes a step's inputs on the device.
        overlap: Whether the host is one step behind the device, with the same tokens; None is yes on a GPU. It may be
            changed between steps: after the next step with it off, no step is in flight.
        cuda_graphs: Whether decode steps are recorded and replayed; None is yes on a GPU. On a CPU steps are padded as
            for a graph, and run.
        ranges: Name a step and its phases, the forward with the ids of its requests.
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
        self._prompt_scorer = PromptScorer()
        self._launched: _LaunchedStep | None = None  # the step in flight, not committed yet
        self._graphs: DecodeGraphs | None = None
        if is_gpu if cuda_graphs is None else cuda_graphs:
            recorder = CudaRecorder(device, ranges) if is_gpu else EagerRecorder()
            rows, longest = scheduler.table.num_rows, scheduler.max_model_len
            self._graphs = DecodeGraphs(
                model, kv_cache, self._state, recorder, max_rows=rows, max_model_len=longest,
                num_states=scheduler.states.pool.num_blocks if scheduler.states is not None else 0, ranges=ranges,
            )  # fmt: skip
        self._requests: dict[int, Request] = {}
        self._num_watched = 0  # unfinished requests that are watched
        self._num_unbegun = 0  # unfinished requests without a token yet
        self._peak = PeakUse()
        of_blocks = (
            kv_cache.blocks if isinstance(kv_cache, CacheTensors) else [one for layer in kv_cache for one in layer]
        )
        self._kv_bytes = sum(tensor.nbytes for tensor in of_blocks)

    @property
    def phases(self) -> Phases:
        """The ranges that name what it does; what is done between two steps enters them too."""
        return self._phases

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
        """Queues a request.

        Args:
            request_id: Its sequence's id, unique among the unfinished.
            prompt: [n] token ids.
            params: How tokens are chosen.
            detokenizer: Makes the request's text; needed where it has stop strings.
            arrival_time: Seconds on time.perf_counter's clock; None is now.
            priority: Lower goes first.
            cache_salt: Requests with equal salts share cached prefixes.

        Raises:
            RefusedError: It could never run to its end here.
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
        grammar: Grammar | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> list[Request]:
        """Queues a request for each of `params`, all of one `prompt`, which is computed once. Otherwise as `add`.

        `grammar` is that of their structured_outputs.
        """
        for one, detokenizer in zip(params, detokenizers, strict=True):
            if one.stop_strings and detokenizer is None:
                raise RefusedError("stop strings are looked for in text, and there is no tokenizer to make it")
            if any(isinstance(word, str) for word in one.forbidden):
                raise RefusedError("bad_words are compared with tokens, and there is no tokenizer to spell them")
            if one.structured_outputs is not None and grammar is None:
                raise RefusedError("structured_outputs need a grammar over tokens, and none was given")
        sequences = self.scheduler.add_group(request_ids, prompt, params, priority=priority, cache_salt=cache_salt)
        arrival = time.perf_counter() if arrival_time is None else arrival_time
        wanted = [one.prompt_logprobs for one in params if one.prompt_logprobs is not None]
        scores = PromptScores(sequences[0].tokens, max(wanted)) if wanted else None
        return [
            self._register(
                Request(s, arrival, d, grammar=None if grammar is None else grammar.start(), prompt_scores=scores)
            )
            for s, d in zip(sequences, detokenizers, strict=True)
        ]

    def fork(self, request_id: int, new_id: int, params: SamplingParams, *, num_tokens: int) -> Request:
        """Queues a request that goes on from the first `num_tokens` tokens of an unfinished one, see Scheduler.fork.

        The fork ignores stop strings, and prompt_logprobs; it has no grammar.
        """
        if params.structured_outputs is not None:
            raise RefusedError("a fork takes no structured_outputs: its output has begun already")
        return self._register(
            Request(self.scheduler.fork(request_id, new_id, params, num_tokens=num_tokens), time.perf_counter())
        )

    def _register(self, request: Request) -> Request:
        self._requests[request.sequence.id] = request
        self._num_watched += request.is_watched
        self._num_unbegun += 1
        if request.prompt_scores is not None:
            self._prompt_scorer.add(request.sequence, request.prompt_scores)
        if request.grammar is not None:
            self._sampler.grammars.add(request.sequence.id, request.grammar)
        return request

    def abort(self, sequence_id: int) -> Request | None:
        """Ends a request in whatever state it is. Returns it, or None where there is no such request."""
        if self.scheduler.abort(sequence_id) is None:
            return None
        request = self._requests[sequence_id]
        self._finish_request(request, time.perf_counter())
        if self._launched is not None and not self._requests:  # nobody waits for the step in flight
            self._complete_step(self._launched)
        return request

    def step(self) -> list[Request]:
        """Advances every sequence that can advance.

        Where the device has too little memory for the step, the requests that it would have advanced end with that
        reason. Any other exception of the model passes through. Every request is aborted first, because the caches may
        hold anything.

        Returns:
            The requests that finished; with overlap those that the step before finished.
        """
        try:
            with self._phases.step:
                return self._step()
        except BaseException:
            self._launched = None
            self.scheduler.abort_all()
            self._requests.clear()
            self._prompt_scorer.clear()
            self._sampler.grammars.clear()
            self._num_watched = self._num_unbegun = 0
            raise

    def forget_graphs(self) -> None:
        """Drops all recorded decode steps; their next use records them again.

        A profiler needs this: it does not know the launches in a graph that was recorded before it began.
        """
        if self._graphs is not None:
            self._graphs.forget()

    def use_model(self, model: Forward, *, step_inputs: StepInputs, pages: PageMover) -> int:
        """Runs `model` from the next step on, which has the same caches; a step in flight ends as it began.

        Args:
            model: As the engine was made with, like `step_inputs` and `pages`.

        Returns:
            The number of the first step that it runs; the engine's first is 0.
        """
        if self._state.device.type == "cuda":  # a graph in flight, and weights that it reads, must outlive it
            torch.cuda.synchronize(self._state.device)
        self._model, self._state.step_inputs, self._pages = model, step_inputs, pages
        if self._graphs is not None:
            self._graphs.use_model(model)
        return self.scheduler.counters.num_steps

    def stats(self) -> EngineStats:
        """Returns counts since the engine was made, and the pool's use."""
        return EngineStats.collect(self.scheduler, self._peak, self._kv_bytes)

    def reset_peak(self) -> None:
        """Starts the peaks in `stats` anew."""
        self._peak.reset()

    def _step(self) -> list[Request]:
        finished: list[Request] = []
        if self._launched is not None and not self.overlap:  # overlap has just been switched off
            finished = self._complete_step(self._launched)
        phases = self._phases
        with phases.schedule:
            plan = self.scheduler.schedule()
            self._peak.record(self.scheduler)
        launched = self._launched
        with phases.prepare:
            self._move_pages(plan)
            if plan.placed.size:
                self._sampler.forget(plan.placed)
                self._note_scheduled(plan.placed)
            step = self._builder.arrange(plan)
        if step is None:
            if launched is None and self._requests:  # the scheduler never does this; without a check a loop would hang
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can advance")
            if launched is not None:
                finished += self._complete_step(launched)
            self.scheduler.commit(plan, plan.sampled)
            return finished
        with torch.inference_mode():
            computed = self._compute(plan, step)
            if launched is not None:
                finished += self._complete_step(launched)
            sampling = computed if isinstance(computed, str) else self._sample(plan, step, *computed)
        if isinstance(sampling, str):
            return finished + self._lose_step(plan, sampling)
        self._launched = sampling
        if self.overlap and self._requests:
            return finished
        return finished + self._complete_step(sampling)

    def _compute(self, plan: StepPlan, step: ArrangedPlan) -> tuple[torch.Tensor, ScoredPrompts | None] | str:
        """`_forward` of a step, or why the device had too little memory for it."""
        phases = self._phases
        try:
            with phases.forward.carrying(self._request_ids(plan)) if phases.listening else phases.forward:
                return self._forward(step)
        except RuntimeError as error:
            if (why := explain_exhaustion(error)) is None:
                raise
            return why

    def _sample(
        self, plan: StepPlan, step: ArrangedPlan, logits: torch.Tensor, prompts: ScoredPrompts | None
    ) -> _LaunchedStep | str:
        """Launches a step's sampling from its `logits` [m, V], or says why there was too little memory for it."""
        try:
            with self._phases.sample:
                rows, lengths, epochs = step.sampled_rows, step.lengths, step.sampled_epochs
                nobody_left = self.scheduler.table.num_departures == plan.num_departures
                sampled = self._sampler.sample(logits, rows, lengths, None if nobody_left else epochs)
                self._state.keep_tokens(rows, lengths, epochs, sampled.token_ids)
                store = None if prompts is None else self._reader.start_prompts(prompts)
                return _LaunchedStep(plan, step, self._reader.start(sampled), store)
        except RuntimeError as error:
            if (why := explain_exhaustion(error)) is None:
                raise
            return why

    def _lose_step(self, plan: StepPlan, why: str) -> list[Request]:
        """Ends the requests of a step for which the device had too little memory; others' tokens are as they were."""
        lost = self.scheduler.lose(plan)
        now = time.perf_counter()
        what = f"the device had too little memory for a step of {plan.num_tokens} tokens of {plan.rows.size} requests"
        requests = [self._requests[sequence.id] for sequence in lost]
        for request in requests:
            request.error = f"{what}: {why}"
            self._finish_request(request, now)
        return requests

    def _note_scheduled(self, rows: Ints) -> None:
        """Notes when the requests that came into `rows` first got one."""
        now = time.perf_counter()
        for row in rows.tolist():
            sequence = self.scheduler.table.sequences[row]
            if sequence is not None:
                request = self._requests[sequence.id]
                if request.first_scheduled_time is None:
                    request.first_scheduled_time = now

    def _forward(self, step: ArrangedPlan) -> tuple[torch.Tensor, ScoredPrompts | None]:
        """Computes the logits [m, V] of the step's sampled rows, and the scores of prompts that want any."""
        if self._graphs is not None and step.all_decode:
            return self._graphs.run(step.rows, step.starts, step.state_slots), None
        spans = self._prompt_scorer.find_spans(step)
        if not spans:
            return self._model(self._builder.build(step), self._kv_cache), None
        batch = self._builder.build(step, np.concatenate([span.tokens for span in spans]))
        return compute_with_prompts(self._model, batch, self._kv_cache, step.sampled_tokens, spans)

    def _request_ids(self, plan: StepPlan) -> list[int]:
        """The ids of the requests that advance in a step, in the order of its rows."""
        sequences = (self.scheduler.table.sequences[row] for row in plan.rows.tolist())
        return [sequence.id for sequence in sequences if sequence is not None]

    def _move_pages(self, plan: StepPlan) -> None:
        """Copies pages and states as the plan asks, in the order that its forward needs."""
        if not (plan.swap_outs.size or plan.swap_ins.size or plan.copies.size):  # no state moves without pages
            return
        if self._pages is None:
            raise RuntimeError("the plan copies pages, and the engine was made without a way to")
        _copy_pairs(self._pages.swap_out, plan.swap_outs)
        _copy_pairs(self._pages.swap_in, plan.swap_ins)
        _copy_pairs(self._pages.copy, plan.copies)
        if plan.states is not None and self._states is not None:
            _copy_pairs(self._states.swap_out, plan.states.swap_outs)
            _copy_pairs(self._states.swap_in, plan.states.swap_ins)

    def _complete_step(self, launched: _LaunchedStep) -> list[Request]:
        """Waits for a step's tokens and commits them. Returns the requests that finished."""
        self._launched = None
        with self._phases.wait:
            outcome = launched.readback()
            if launched.store_prompts is not None:
                launched.store_prompts()
        with self._phases.commit:
            return self._commit(launched, outcome)

    def _commit(self, launched: _LaunchedStep, outcome: Outcome) -> list[Request]:
        plan, step, tokens = launched.plan, launched.step, outcome.token_ids
        # These are looked up first, because the commit removes requests that end.
        begun = self._live_requests(step) if self._num_unbegun else {}
        broken = {} if outcome.all_chosen else self._live_requests(step, tokens < 0)
        watched = self._live_requests(step, tokens >= 0) if self._num_watched else {}

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
        new, lengths = (tokens.tolist(), step.lengths.tolist()) if watched else ([], [])
        for entry, request in watched.items():
            if request.is_watched:
                self._check_token(request, new[entry], lengths[entry] + 1, outcome.logprobs.get(entry), finished)
        for entry, request in broken.items():
            if request.sequence.params.max_tokens == 0:  # nobody asked for this token
                continue
            self._fail_request(request, int(tokens[entry]), outcome.faults.get(entry), finished)
        for request in finished:
            self._finish_request(request, now)
        return finished

    def _live_requests(self, step: ArrangedPlan, wanted: NDArray[np.bool_] | None = None) -> dict[int, Request]:
        """Sampled entry -> request, for rows that still hold the sequence that was planned.

        Args:
            step: The plan.
            wanted: [m], which sampled entries; None is all.
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
        """Stores a new token's log-probabilities, and ends its request at a stop string, by a stopping criterion or
        where its grammar does.
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
        if request.grammar is not None:
            reason = _advance_grammar(request, request.grammar, token) or reason
        if sequence.params.stop_strings:
            with self._phases.detokenize:
                reason = request.look_for_stop(token, may_stop=may_stop) or reason
        if request.error is not None:
            reason = "error"
        if reason is not None and self.scheduler.finish(sequence.id, reason) is not None:
            finished.append(request)
        if reason == "error":  # which its last token may have been the end of by its length
            sequence.finish_reason = reason

    def _fail_request(self, request: Request, token: int, fault: str | None, finished: list[Request]) -> None:
        """Ends a request that got no token, `token` < 0: by the `fault` of a logits processor, or see Sampled."""
        sequence = request.sequence
        if self.scheduler.finish(sequence.id, "error") is not None:
            finished.append(request)
        sequence.tokens = sequence.tokens[:-1]
        sequence.finish_reason = "error"
        place = f"output token {sequence.tokens.size - sequence.prompt_len}"
        if token == NONE_LEFT:
            barring = name_barring_parameters(sequence.params)
            request.at_fault = next(iter(barring), None)
            why = f"{' and '.join(barring) or 'the parameters'} left no token to choose {place} from"
        else:
            why = f"the model's logits for {place} are not finite: {_AT_FAULT}"
        request.error = fault or (request.grammar and request.grammar.error) or why

    def _finish_request(self, request: Request, now: float) -> None:
        """Removes a finished request and completes its text and times."""
        del self._requests[request.sequence.id]
        self._num_watched -= request.is_watched
        self._num_unbegun -= request.first_token_time is None
        request.finish_time = now
        self._sampler.grammars.forget(request.sequence.id)
        if request.prompt_scores is not None:
            self._prompt_scorer.forget(request.sequence.id)
            if request.prompt_scores.has_nan and request.error is None:
                request.error, request.sequence.finish_reason = _PROMPT_NOT_FINITE, "error"
        if request.detokenizer is not None and request.stops_at_text:
            try:
                request.detokenizer.finish()
            except RequestFault as fault:
                request.fail(str(fault))
            if request.detokenizer.is_stopped and request.error is None:
                # The last token may have reached a length limit too; a stop string comes first.
                request.sequence.finish_reason = "stop"


def _advance_grammar(request: Request, grammar: GrammarState, token: int) -> str | None:
    """Appends a new token to the request's grammar. Returns why it ends the output; None where it does not."""
    sequence = request.sequence
    if sequence.finish_reason not in (None, "length"):  # an end token is no part of the form
        return None
    if not grammar.append(token):
        return None
    if grammar.error is not None:
        if request.error is None:
            request.error, request.at_fault = grammar.error, "structured_outputs"
        return "error"
    if sequence.finish_reason is not None:  # complete, if just at its longest
        sequence.finish_reason = "stop"
    return "stop"


def _copy_pairs(move: Callable[[BlockIds], None], pairs: BlockIds) -> None:
    if pairs.size:
        move(pairs)
