"""Who is let in: counted at the door, before anything is tokenized, and given back at the end.

Pure bookkeeping on one thread; the clock of the rates is `limits`' own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

Reason = Literal["in_flight", "waiting_tokens", "requests_per_minute", "tokens_per_minute"]


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is not let in.

    Attributes:
        reason: Which bound it met.
        message: The bound, and what it met.
        retry_after: Seconds after which to ask again; None where the request alone is above the bound, at any time.
    """

    reason: Reason
    message: str
    retry_after: float | None


class Ticket:
    """What one admitted request holds, until `give_back`, which may be called again."""

    def __init__(self, admission: Admission, num_completions: int, num_tokens: int) -> None:
        self._admission = admission
        self._num_completions = num_completions
        self._num_tokens = num_tokens
        admission.num_in_flight += num_completions
        admission.num_waiting_tokens += num_tokens

    def count(self, num_tokens: int) -> None:
        """Puts the counted prompt tokens in the place of the estimate."""
        self._admission.num_waiting_tokens += num_tokens - self._num_tokens
        self._num_tokens = num_tokens

    def start(self) -> None:
        """Its prompt waits no more: the first output token has come."""
        self.count(0)

    def give_back(self) -> None:
        """Gives all back."""
        self.count(0)
        self._admission.num_in_flight -= self._num_completions
        self._num_completions = 0


class Admission:
    """Counts what is in work.

    Args:
        max_in_flight: Completions.
        max_waiting_tokens: Prompt tokens that wait for their first output token.
        requests_per_minute: Of each tenant; None is no bound.
        tokens_per_minute: Of each tenant; None is no bound.

    Attributes:
        num_in_flight: Completions in work or waiting.
        num_waiting_tokens: Prompt tokens that wait.
    """

    def __init__(
        self,
        max_in_flight: int,
        max_waiting_tokens: int,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self.num_in_flight = 0
        self.num_waiting_tokens = 0
        self._max_in_flight, self._max_waiting_tokens = max_in_flight, max_waiting_tokens
        self._rates: dict[Reason, tuple[int, RateLimitItemPerMinute]] = {}
        if requests_per_minute is not None:
            self._rates["requests_per_minute"] = requests_per_minute, RateLimitItemPerMinute(requests_per_minute)
        if tokens_per_minute is not None:
            self._rates["tokens_per_minute"] = tokens_per_minute, RateLimitItemPerMinute(tokens_per_minute)
        self._limiter = MovingWindowRateLimiter(MemoryStorage()) if self._rates else None

    def admit(self, key: str, num_completions: int, num_tokens: int, num_asked: int) -> Ticket | Refused:
        """Lets a request in, or says why not; a refused one has used up nothing.

        Args:
            key: Whose rates it uses.
            num_completions: That it asks for, over all its prompts.
            num_tokens: Estimate of its prompt tokens.
            num_asked: Those and the output tokens that it may make, for the rate.
        """
        if self.num_in_flight + num_completions > self._max_in_flight:
            return self._full("in_flight", "completions in work", num_completions, self.num_in_flight)
        # An empty queue takes any prompt that the model takes.
        if self.num_waiting_tokens and self.num_waiting_tokens + num_tokens > self._max_waiting_tokens:
            return self._full("waiting_tokens", "prompt tokens waiting", num_tokens, self.num_waiting_tokens)
        return self._use_rates(key, num_asked) or Ticket(self, num_completions, num_tokens)

    def _full(self, reason: Reason, what: str, asked: int, used: int) -> Refused:
        bound = self._max_in_flight if reason == "in_flight" else self._max_waiting_tokens
        if reason == "in_flight" and asked > bound:
            return Refused(reason, f"the request asks for {asked} {what}, and the server takes {bound}", None)
        return Refused(reason, f"the server has {used} of {bound} {what}, and the request asks for {asked}", 1.0)

    def _use_rates(self, key: str, num_asked: int) -> Refused | None:
        if self._limiter is None:
            return None
        for reason, (bound, item) in self._rates.items():
            cost = 1 if reason == "requests_per_minute" else num_asked
            if cost > bound:
                return Refused(reason, f"the request asks for {cost} tokens, and {reason} is {bound}", None)
            if not self._limiter.test(item, reason, key, cost=cost):
                reset = self._limiter.get_window_stats(item, reason, key).reset_time
                return Refused(reason, f"{reason} of this tenant is {bound}", max(0.1, reset - time.time()))
        for reason, (_, item) in self._rates.items():
            self._limiter.hit(item, reason, key, cost=1 if reason == "requests_per_minute" else num_asked)
        return None
