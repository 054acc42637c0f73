"""Beam search on top of forks: the beams of a prompt share the blocks of what they have in common.

The semantics, exactly. A hypothesis is an output and the sum of its tokens' log-probabilities (of the model's own
logits, in float64). There are up to `beam_width` live ones; at first the empty one. In each step all continuations of
the live ones by one token are ranked by their sums, the larger first; of equal ones that of the live hypothesis that is
ranked higher, then the lower token id. From the top down, a continuation that ends with an end-of-sequence token is
finished, any other becomes live, until `beam_width` are live; what ranks below is forgotten. Hypotheses of `max_tokens`
tokens are finished too, and so are those that fill the model's length. The results are the `beam_width` finished ones
of the highest scores, score = sum / tokens ** length_penalty with the ending token counted; of equal scores the one
that was finished first, in the order above.

The search ends as soon as no live hypothesis can reach a result, which changes none: a sum only falls.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from tsched.execution.engine import Engine, Request
from tsched.requests.errors import RefusedError
from tsched.requests.sampling_params import MAX_COUNT, SamplingParams
from tsched.scheduling.sequence import Ints

MAX_BEAM_WIDTH = 128


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Checked when it is made; ValueError names what is wrong. Names are vLLM's.

    beam_width      in [1, 128]; hypotheses that live at once, and completions that are returned
    max_tokens      in [1, 2**31) output tokens; the model's length ends hypotheses too
    length_penalty  in [-16, 16]; a completion's score is its summed log-probability / tokens ** length_penalty, so
                    that larger values favour longer completions
    ignore_eos      treat end-of-sequence tokens like any others
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
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
            object.__setattr__(self, name, number)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not -16 <= penalty <= 16:
            raise ValueError(f"length_penalty must be a number from -16 to 16, got {penalty!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")

    def score(self, logprob: float, num_tokens: int) -> float:
        """That of `num_tokens` >= 1 tokens whose log-probabilities sum to `logprob`."""
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
    """The search for one prompt. `begin`, then `advance` after each step of the engine, until `is_over`.

    next_id        makes ids for the engine's requests
    eos_token_ids  the tokens that end a hypothesis, unless params.ignore_eos

    The engine must not overlap: a beam's next token is chosen here, so none may be under way. Its other requests are
    not disturbed. Memory: the blocks that beams do not share, and log-probabilities [V] float64 for each.
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
            raise ValueError("beam search chooses the tokens itself, which an engine with overlap cannot wait for")
        self.finished: list[Hypothesis] = []  # best first, beam_width at most
        self.error: str | None = None
        self.first_token_time: float | None = None
        self.num_preemptions = 0
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._next_id = next_id
        self._ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._live: list[_Beam] = []  # in the order of their rank
        self._max_tokens = params.max_tokens  # of a hypothesis, once it has begun: what the model's length leaves

    @property
    def is_over(self) -> bool:
        return not self._live

    def begin(self, *, arrival_time: float, priority: int = 0, cache_salt: bytes = b"") -> None:
        """Queue the prompt; RefusedError where it and the longest output could never fit."""
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
        """End the search; nothing of it stays in the engine."""
        for beam in self._live:
            self._engine.abort(beam.request.sequence.id)
        self._live = []

    def advance(self) -> None:
        """Take the next step of the search, where the engine has computed all that it needs. What the engine refuses
        ends the search with that `error`.
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
            chosen = self._rank(parents, torch.stack(captured))
            if not self._is_decided(chosen, len(parents[0].token_ids) + 1):
                for i, token, logprob in chosen:
                    self._live.append(self._grow(parents[i], token, logprob))
        except RefusedError as error:
            self.error = str(error)
            self.abort()
        finally:
            for beam in parents:  # after the forks: what they share must not be given back before
                self.num_preemptions += beam.request.sequence.num_preemptions
                self._engine.abort(beam.request.sequence.id)

    def _rank(self, parents: list[_Beam], logprobs: torch.Tensor) -> list[tuple[int, int, float]]:
        """The continuations that live, as (place of the parent, token, sum), from `logprobs` [b, V] float64; those that
        end are put among the finished.
        """
        params = self._params
        is_last = len(parents[0].token_ids) + 1 == self._max_tokens
        sums = torch.tensor([beam.logprob for beam in parents], dtype=torch.float64, device=logprobs.device)
        chosen: list[tuple[int, int, float]] = []
        # Above the last one needed are at most the ends of each parent.
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
        self.finished.append(hypothesis)
        self.finished.sort(key=lambda one: -self._params.score(one.logprob, len(one.token_ids)))  # stable
        del self.finished[self._params.beam_width :]

    def _is_decided(self, chosen: list[tuple[int, int, float]], num_tokens: int) -> bool:
        """Whether none of the continuations `chosen`, of `num_tokens` tokens, can still become a result."""
        params = self._params
        if not chosen:
            return True
        if len(self.finished) < params.beam_width:
            return False
        worst = params.score(self.finished[-1].logprob, len(self.finished[-1].token_ids))
        # The first of them has the highest sum, no sum rises, and what a length makes of one rises or falls with it.
        lengths = (num_tokens + 1, self._max_tokens)
        return max(params.score(chosen[0][2], length) for length in lengths) <= worst

    def _grow(self, parent: _Beam, token: int, logprob: float) -> _Beam:
        """The beam that is `parent` and `token`. It shares the parent's blocks."""
        length = len(self._prompt) + len(parent.token_ids) + 1
        capture = _Capture(length)
        sequence = parent.request.sequence
        if sequence.finish_reason is None:
            # The parent's own next token takes the place that `token` is put into.
            request = self._engine.fork(
                sequence.id,
                self._next_id(),
                self._request_params(capture, len(self._prompt) + self._max_tokens - sequence.prompt_len),
                num_tokens=length,
            )
            self._engine.scheduler.replace_last(request.sequence.id, token)
        else:
            # It went on alone, to its end, while others waited for blocks: its blocks are gone.
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
    """The `count` largest of `values` [b, V], as (row, column, value), in falling order; of equal ones the lower row,
    then the lower column first. Only finite values count.
    """
    flat = values.flatten()
    threshold = flat.topk(min(count, flat.numel())).values[-1]
    places = ((flat >= threshold) & flat.isfinite()).nonzero().squeeze(1)  # in rising order, at least `count` of them
    found = sorted(zip(flat[places].tolist(), places.tolist(), strict=True), key=lambda entry: -entry[0])[:count]
    return [(place // values.shape[1], place % values.shape[1], value) for value, place in found]
