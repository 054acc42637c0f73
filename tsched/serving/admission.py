"""Who is let in: counted at the door, before anything is tokenized, and given back at the end.

Pure bookkeeping on one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Literal

_MINUTE_S = 60.0
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


class Rate:
    """What each tenant may use in a minute: a bucket that empties evenly, a full one in a minute.

    Args:
        bound: What a bucket holds.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._buckets: dict[str, tuple[float, float]] = {}  # tenant -> what is in it, and when that was so

    def wait_s(self, tenant: str, cost: int) -> float:
        """Seconds after which `cost` fits into a tenant's bucket; 0 where it does now."""
        return max(0.0, (self._level(tenant) + cost - self.bound) * _MINUTE_S / self.bound)

    def use(self, tenant: str, cost: int) -> None:
        """Puts `cost` into a tenant's bucket, even where that is more than it holds; below 0 takes it out."""
        self._buckets[tenant] = max(0.0, self._level(tenant) + cost), monotonic()

    def _level(self, tenant: str) -> float:
        level, then = self._buckets.get(tenant, (0.0, 0.0))
        return max(0.0, level - (monotonic() - then) * self.bound / _MINUTE_S)


class Ticket:
    """What one admitted request holds, until `give_back`, which may be called again."""

    def __init__(
        self,
        admission: Admission,
        tenant: str,
        num_completions: int,
        num_tokens: int,
        costs: Mapping[Reason, int],
    ) -> None:
        self._admission, self._tenant = admission, tenant
        self._num_completions = num_completions
        self._num_tokens = num_tokens
        self._costs = dict(costs)
        admission.num_in_flight += num_completions
        admission.num_waiting_tokens += num_tokens
        for reason, cost in costs.items():
            admission.rates[reason].use(tenant, cost)

    def count(self, num_prompt_tokens: int, num_output_tokens: int) -> Refused | None:
        """Puts counted tokens in the place of estimates; says why where the request alone is above a bound.

        Args:
            num_prompt_tokens: Of all prompts.
            num_output_tokens: That it may make.
        """
        self._wait_with(num_prompt_tokens)
        if (rate := self._admission.rates.get("tokens_per_minute")) is None:
            return None
        cost = num_prompt_tokens + num_output_tokens
        if cost > rate.bound:
            asked = f"{num_prompt_tokens} tokens of prompt and {num_output_tokens} of output"
            return Refused(
                "tokens_per_minute", f"the request asks for {asked}; tokens_per_minute is {rate.bound}", None
            )
        rate.use(self._tenant, cost - self._costs["tokens_per_minute"])
        self._costs["tokens_per_minute"] = cost
        return None

    def refund(self) -> None:
        """Gives back what it used of the rates, unless it has had output."""
        for reason, cost in self._costs.items():
            self._admission.rates[reason].use(self._tenant, -cost)
        self._costs = {}

    def start(self) -> None:
        """Its prompt waits no more: the first output token has come."""
        self._wait_with(0)
        self._costs = {}

    def give_back(self) -> None:
        """Gives all back that is in work."""
        self._wait_with(0)
        self._admission.num_in_flight -= self._num_completions
        self._num_completions = 0

    def _wait_with(self, num_tokens: int) -> None:
        self._admission.num_waiting_tokens += num_tokens - self._num_tokens
        self._num_tokens = num_tokens


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
        rates: Those that are bounded.
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
        bounds: dict[Reason, int | None] = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
        }
        self.rates = {reason: Rate(bound) for reason, bound in bounds.items() if bound is not None}

    def admit(
        self, tenant: str, num_completions: int, num_prompt_tokens: int, num_output_tokens: int
    ) -> Ticket | Refused:
        """Lets a request in, or says why not; a refused one has used up nothing.

        Args:
            tenant: Whose rates it uses.
            num_completions: That it asks for, over all its prompts.
            num_prompt_tokens: Estimate of them.
            num_output_tokens: That it may make.
        """
        if self.num_in_flight + num_completions > self._max_in_flight:
            return self._full("in_flight", "completions in work", num_completions, self.num_in_flight)
        # An empty queue takes any prompt that the model takes.
        if self.num_waiting_tokens and self.num_waiting_tokens + num_prompt_tokens > self._max_waiting_tokens:
            return self._full("waiting_tokens", "prompt tokens waiting", num_prompt_tokens, self.num_waiting_tokens)
        costs: dict[Reason, int] = {}
        for reason, rate in self.rates.items():
            costs[reason] = 1
            if reason == "tokens_per_minute":
                if num_output_tokens > rate.bound:
                    asked = f"{num_output_tokens} tokens of output over {num_completions} completions"
                    return Refused(reason, f"the request asks for {asked}; {reason} is {rate.bound}", None)
                # Whether it is above the bound by itself is known once its prompts are counted.
                costs[reason] = min(num_prompt_tokens + num_output_tokens, rate.bound)
            if wait := rate.wait_s(tenant, costs[reason]):
                return Refused(reason, f"{reason} of this tenant is {rate.bound}", wait)
        return Ticket(self, tenant, num_completions, num_prompt_tokens, costs)

    def _full(self, reason: Reason, what: str, asked: int, used: int) -> Refused:
        bound = self._max_in_flight if reason == "in_flight" else self._max_waiting_tokens
        if reason == "in_flight" and asked > bound:
            return Refused(reason, f"the request asks for {asked} {what}, and the server takes {bound}", None)
        return Refused(reason, f"the server has {used} of {bound} {what}, and the request asks for {asked}", 1.0)
