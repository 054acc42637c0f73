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

import numpy as np
from numpy.typing import NDArray

from tsched.execution.batch_builder import ArrangedPlan
from tsched.execution.engine_stats import EngineStats, PeakUse
from tsched.execution.exhaustion import Exhaustion, attempt
from tsched.execution.model_runner import Forward, LaunchedStep, ModelRunner
from tsched.execution.phases import Phases
from tsched.execution.prompt_logprobs import PromptScores
from tsched.execution.readback import Outcome
from tsched.execution.request import AT_FAULT, Request
from tsched.execution.sampler import NONE_LEFT, TokenLogprobs
from tsched.execution.step_kernels import StepKernels
from tsched.requests.detokenizer import IncrementalDetokenizer
from tsched.requests.errors import RefusedError
from tsched.requests.first_token import name_barring_parameters
from tsched.requests.grammar import Grammar
from tsched.requests.sampling_params import SamplingParams
from tsched.scheduling.scheduler import Scheduler
from tsched.scheduling.sequence import Ints
from tsched.scheduling.step_plan import PageMover, StepPlan


class Engine:
    """Joins a scheduler and the runner of a model. Not for use by two threads at once.

    Args:
        scheduler: Plans the steps.
        runner: Carries them out.
        overlap: Whether the host is one step behind the device, with the same tokens; None is yes on a GPU. It may be
            changed between steps: after the next step with it off, no step is in flight.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, *, overlap: bool | None = None) -> None:
        self.scheduler = scheduler
        self.overlap = not runner.runtime.is_host if overlap is None else overlap
        self._runner = runner
        self._phases = runner.phases
        self._launched: LaunchedStep | None = None  # the step in flight, not committed yet
        self._requests: dict[int, Request] = {}
        self._num_watched = 0  # unfinished requests that are watched
        self._num_unbegun = 0  # unfinished requests without a token yet
        self._peak = PeakUse()

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
        self._runner.enter(request)
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
            self._runner.clear()
            self._num_watched = self._num_unbegun = 0
            raise

    def forget_graphs(self) -> None:
        """Drops all recorded steps; their next use records them again.

        A profiler needs this: it does not know the launches in a graph that was recorded before it began.
        """
        self._runner.forget_graphs()

    def record_graphs(self, tell: Callable[[int, int], object]) -> None:
        """Records all steps now that graphs are for, the largest first; without graphs there is nothing to do.

        Args:
            tell: Called with how many are recorded and how many will be.
        """
        self._runner.record_graphs(tell)

    def use_model(self, model: Forward, *, kernels: StepKernels, pages: PageMover) -> int:
        """Runs `model` from the next step on, which has the same caches; a step in flight ends as it began.

        Args:
            model: As the runner was made with, like `kernels` and `pages`.

        Returns:
            The number of the first step that it runs; the engine's first is 0.
        """
        self._runner.use_model(model, kernels=kernels, pages=pages)
        return self.scheduler.counters.num_steps

    def stats(self) -> EngineStats:
        """Returns counts since the engine was made, and the pool's use."""
        return EngineStats.collect(self.scheduler, self._peak, self._runner.kv_bytes)

    def reset_peak(self) -> None:
        """Starts the peaks in `stats` anew."""
        self._peak.reset()

    def _step(self) -> list[Request]:
        finished: list[Request] = []
        if self._launched is not None and not self.overlap:  # overlap has just been switched off
            finished = self._complete_step(self._launched)
        with self._phases.schedule:
            plan = self.scheduler.schedule()
            self._peak.record(self.scheduler)
            self._note_scheduled(plan.placed)
        computed = attempt(self._runner.compute, plan)
        before = self._launched
        if before is not None:
            finished += self._complete_step(before)
        if computed is None:
            if before is None and self._requests:  # the scheduler never does this; without a check a loop would hang
                raise RuntimeError(f"{len(self._requests)} requests are unfinished and none can advance")
            self.scheduler.commit(plan, plan.sampled)
            return finished
        launched = computed if isinstance(computed, Exhaustion) else attempt(self._runner.sample, computed)
        if isinstance(launched, Exhaustion):
            return finished + self._lose_step(plan, launched)
        self._launched = launched
        if self.overlap and self._requests:
            return finished
        return finished + self._complete_step(launched)

    def _note_scheduled(self, rows: Ints) -> None:
        """Notes when the requests that came into `rows` first got one."""
        if rows.size == 0:
            return
        now = time.perf_counter()
        for row in rows.tolist():
            sequence = self.scheduler.table.sequences[row]
            if sequence is not None:
                request = self._requests[sequence.id]
                if request.first_scheduled_time is None:
                    request.first_scheduled_time = now

    def _complete_step(self, launched: LaunchedStep) -> list[Request]:
        """Waits for a step's tokens and commits them. Returns the requests that finished."""
        self._launched = None
        outcome = attempt(self._runner.read, launched)
        if isinstance(outcome, Exhaustion):
            return self._lose_step(launched.plan, outcome)
        with self._phases.commit:
            return self._commit(launched.plan, launched.arranged, outcome)

    def _lose_step(self, plan: StepPlan, exhaustion: Exhaustion) -> list[Request]:
        """Ends the requests of a step for which the device had too little memory; others' tokens are as they were."""
        lost = self.scheduler.lose(plan)
        now = time.perf_counter()
        what = f"the device had too little memory for a step of {plan.num_tokens} tokens of {plan.rows.size} requests"
        requests = [self._requests[sequence.id] for sequence in lost]
        for request in requests:
            request.error = f"{what}: {exhaustion.why}"
            self._finish_request(request, now)
        return requests

    def _commit(self, plan: StepPlan, step: ArrangedPlan, outcome: Outcome) -> list[Request]:
        tokens = outcome.token_ids
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
            reason = request.ask_criteria(sequence.freeze_tokens(self.scheduler.table.tokens[sequence.row, :length]))
        reason = request.advance_grammar(token) or reason
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
            why = f"the model's logits for {place} are not finite: {AT_FAULT}"
        request.error = fault or (request.grammar and request.grammar.error) or why

    def _finish_request(self, request: Request, now: float) -> None:
        """Removes a finished request and completes its text and times."""
        del self._requests[request.sequence.id]
        self._num_watched -= request.is_watched
        self._num_unbegun -= request.first_token_time is None
        self._runner.leave(request)
        request.finish(now)
