"""Beam search on top of forks: the beams of a prompt share the blocks of their common tokens.

A hypothesis is an output and the sum of its tokens' log-probabilities (of the model's own logits, in float64). At most
`beam_width` are live; at first the empty one. Each step ranks all continuations of live hypotheses by one token: the
larger sum first; of equal sums that of the parent ranked higher, then the lower token id. From the top down, a
continuation that ends with an end-of-sequence token is finished and any other becomes live, until `beam_width` are
live. The rest is dropped. A hypothesis of `max_tokens` tokens, or one that fills the model's length, is finished too.
The results are the `beam_width` finished hypotheses of the highest scores, score = sum / tokens ** length_penalty with
the ending token counted; of equal scores the one that finished first, in the order above.

The search stops once no live hypothesis can still become a result: sums only fall, so the results stay the same.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tsched.execution.engine import Engine
from tsched.execution.exhaustion import Exhaustion, attempt
from tsched.execution.request import Request
from tsched.requests.errors import ArgumentError, RefusedError
from tsched.requests.sampling_params import MAX_COUNT, SamplingParams
from tsched.requests.vllm_names import BEAM_NAMES, refuse_other_names
from tsched.scheduling.sequence import Ints

MAX_BEAM_WIDTH = 128


@refuse_other_names(BEAM_NAMES)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The parameters of a beam search; immutable. Names are vLLM's.

    Attributes:
        beam_width: In [1, 128], the hypotheses that live at once and the completions that are returned.
        max_tokens: In [1, 2**31) output tokens; the model's length ends hypotheses too.
        length_penalty: In [-16, 16]. A completion's score is its summed log-probability / tokens ** length_penalty, so
            larger values favour longer completions.
        ignore_eos: Whether end-of-sequence tokens are treated like any others.

    Raises:
        ArgumentError: A field is wrong. The message has its name.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, high in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", MAX_COUNT)):
            value = getattr(self, name)
            allowed = f"an integer {'from 1 to' if high < MAX_COUNT else 'of at least 1 and at most'} {high}"
            try:
                number = 0 if isinstance(value, bool) else operator.index(value)
            except TypeError:
                number = 0
            if not 1 <= number <= high:
                raise ArgumentError(f"{name} must be {allowed}, got {value!r}")
            object.__setattr__(self, name, number)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -16 <= penalty <= 16:
            raise ArgumentError(f"length_penalty must be a number from -16 to 16, got {penalty!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ArgumentError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    def score(self, logprob: float, num_tokens: int) -> float:
        """The score of `num_tokens` >= 1 tokens whose log-probabilities sum to `logprob`."""
        return logprob / num_tokens**self.length_penalty


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An output, ended by a token ("stop") or by its length ("length")."""

    token_ids: tuple[int, ...]
    logprob: float
    finish_reason: str


class _Capture:
    """A logits processor that changes nothing and keeps the log-probabilities that follow `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length  # of prompt and output
        self.logprobs: torch.Tensor | None = None  # [V] float64

    def __call__(self, prompt: Ints, output: Ints, logits: torch.Tensor) -> torch.Tensor:
        if prompt.size + output.size == self.length:
            self.logprobs = logits.log_softmax(dim=-1)
        return logits


@dataclass(frozen=True, slots=True)
class _Beam:
    """A live hypothesis, and the request that computes what follows it."""

    token_ids: tuple[int, ...]
    logprob: float
    request: Request
    capture: _Capture


class BeamSearch:
    """The search for one prompt: call `begin`, then `advance` after each step of the engine, until `is_over`.

    The search chooses each beam's next token, so the engine must not overlap, which would have one in flight. Other
    requests of the engine are not disturbed. Each beam takes the blocks that it does not share, and log-probabilities
    [V] float64.

    Args:
        engine: What computes the beams.
        prompt: Its token ids.
        params: The search's.
        next_id: Makes ids for the engine's requests.
        eos_token_ids: The tokens that end a hypothesis, unless params.ignore_eos.

    Attributes:
        finished: The finished hypotheses, best first, beam_width at most.
        error: Why the search failed; None where it did not.
        first_token_time: Seconds on time.perf_counter's clock; None before.
        num_preemptions: How often its requests gave way to others.

    Raises:
        ArgumentError: The engine overlaps.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: list[int],
        params: BeamSearchParams,
        *,
        next_id: Callable[[], int],
        eos_token_ids: Iterable[int],
    ) -> None:
        if engine.overlap:
            raise ArgumentError("beam search chooses the tokens itself, which an engine with overlap cannot wait for")
        self.finished: list[Hypothesis] = []
        self.error: str | None = None
        self.first_token_time: float | None = None
        self.num_preemptions = 0
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._next_id = next_id
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._live: list[_Beam] = []  # by rank, best first
        self._max_tokens = params.max_tokens  # of a hypothesis; `begin` lowers it to what the model's length leaves

    @property
    def is_over(self) -> bool:
        """Whether no hypothesis is live."""
        return not self._live

    def begin(self, *, arrival_time: float, priority: int = 0, cache_salt: bytes = b"") -> None:
        """Queues the prompt.

        Args:
            arrival_time: Seconds on time.perf_counter's clock.
            priority: Lower goes first.
            cache_salt: Requests with equal salts share cached prefixes.

        Raises:
            RefusedError: The prompt and the longest output could never fit.
        """
        capture = _Capture(len(self._prompt))
        request = self._engine.add(
            self._next_id(),
            self._prompt,
            self._request_params(capture, self._params.max_tokens),
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._max_tokens = request.sequence.max_length - len(self._prompt)
        self._live = [_Beam((), 0.0, request, capture)]

    def abort(self) -> None:
        """Ends the search and all its requests in the engine."""
        for beam in self._live:
            self._engine.abort(beam.request.sequence.id)
        self._live = []

    def advance(self) -> None:
        """Takes the next step of the search, if the engine has computed the logits of every live hypothesis.

        A request that fails or that the engine refuses ends the search with its `error`, and so does too little memory.
        """
        for beam in self._live:
            if beam.request.error is not None:
                self.error = beam.request.error
                self.abort()
                return
        captured = [beam.capture.logprobs for beam in self._live if beam.capture.logprobs is not None]
        if not captured or len(captured) < len(self._live):
            return
        if self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        parents, self._live = self._live, []
        try:
            chosen = attempt(self._rank, parents, captured)
            if isinstance(chosen, Exhaustion):
                what = f"the device had too little memory to compare {len(parents)} beams"
                raise RefusedError(f"{what}: {chosen.why}")
            if not self._is_decided(chosen, len(parents[0].token_ids) + 1):
                for i, token, logprob in chosen:
                    self._live.append(self._grow(parents[i], token, logprob))
        except RefusedError as error:
            self.error = str(error)
            self.abort()
        finally:
            for beam in parents:  # only after the forks, which share their parents' blocks
                self.num_preemptions += beam.request.sequence.num_preemptions
                self._engine.abort(beam.request.sequence.id)

    def _rank(self, parents: list[_Beam], captured: list[torch.Tensor]) -> list[tuple[int, int, float]]:
        """Ranks all continuations and adds those that end to the finished hypotheses.

        Args:
            parents: The b live beams, best first.
            captured: b tensors [V] float64, the log-probabilities of the token that follows each.

        Returns:
            (place of the parent, token, sum) of each continuation that lives, best first.
        """
        params, logprobs = self._params, torch.stack(captured)  # [b, V]
        is_last = len(parents[0].token_ids) + 1 == self._max_tokens
        sums = torch.tensor([beam.logprob for beam in parents], dtype=torch.float64, device=logprobs.device)
        chosen: list[tuple[int, int, float]] = []
        # Besides beam_width that live, at most each parent's end-of-sequence tokens rank above the last of them.
        wanted = params.beam_width + len(parents) * len(self._ends)
        for i, token, logprob in select_largest(sums.unsqueeze(1) + logprobs, wanted):
            if len(chosen) == params.beam_width:
                break
            is_end = token in self._ends
            if not is_end:
                chosen.append((i, token, logprob))
            if is_end or is_last:
                reason = "stop" if is_end else "length"
                self._finish(Hypothesis((*parents[i].token_ids, token), logprob, reason))
        return [] if is_last else chosen

    def _finish(self, hypothesis: Hypothesis) -> None:
        """Adds a hypothesis to the finished and keeps the best."""
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda one: -self._params.score(one.logprob, len(one.token_ids)))  # stable
        del self.finished[self._params.beam_width :]

    def _is_decided(self, chosen: list[tuple[int, int, float]], num_tokens: int) -> bool:
        """Whether no continuation in `chosen`, of `num_tokens` tokens, can still become a result."""
        params = self._params
        if not chosen:
            return True
        if len(self.finished) < params.beam_width:
            return False
        worst = params.score(self.finished[-1].logprob, len(self.finished[-1].token_ids))
        # The first has the highest sum, and sums never rise. For a fixed sum the score is monotonic in the length, so
        # the shortest or the longest output has the best one.
        lengths = (num_tokens + 1, self._max_tokens)
        return max(params.score(chosen[0][2], length) for length in lengths) <= worst

    def _grow(self, parent: _Beam, token: int, logprob: float) -> _Beam:
        """Makes the beam of `parent` and `token`, which shares the parent's blocks."""
        length = len(self._prompt) + len(parent.token_ids) + 1
        capture = _Capture(length)
        sequence = parent.request.sequence
        if sequence.finish_reason is None:
            # The fork has the parent's own next token in its last place; `token` replaces it.
            request = self._engine.fork(
                sequence.id,
                self._next_id(),
                self._request_params(capture, len(self._prompt) + self._max_tokens - sequence.prompt_len),
                num_tokens=length,
            )
            self._engine.scheduler.replace_last(request.sequence.id, token)
        else:
            # While other beams waited for blocks, the parent ran to its end and gave its blocks back.
            tokens = [*self._prompt, *parent.token_ids, token]
            left = self._max_tokens - len(parent.token_ids) - 1
            request = self._engine.add(
                self._next_id(),
                tokens,
                self._request_params(capture, left),
                priority=sequence.priority,
                cache_salt=sequence.cache_salt,
            )
        return _Beam((*parent.token_ids, token), logprob, request, capture)

    @staticmethod
    def _request_params(capture: _Capture, max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logits_processors=[capture])


def select_largest(values: torch.Tensor, count: int) -> list[tuple[int, int, float]]:
    """Selects the largest finite values.

    Args:
        values: [b, V] float64.
        count: How many, at most.

    Returns:
        (row, column, value) of each, in descending order; of equal values the lower row, then the lower column first.
    """
    flat = values.flatten()
    threshold = flat.topk(min(count, flat.numel())).values[-1]
    places = ((flat >= threshold) & flat.isfinite()).nonzero().squeeze(1)  # ascending; ties may make them more
    ranked = sorted(zip(flat[places].tolist(), places.tolist(), strict=True), key=lambda entry: -entry[0])[:count]
    return [(place // values.shape[1], place % values.shape[1], value) for value, place in ranked]
