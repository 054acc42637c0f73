"""What an experiment's YAML may say of the requests that are served."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from experiments.sampling import SAMPLING_KEYS
from experiments.schema.values import Count, Strict
from tsched.requests.prompts import MAX_PRIORITY
from tsched.requests.sampling_params import SamplingParams
from tsched.torch_free import suggest_name

RequestsT = TypeVar("RequestsT", "SyntheticWorkload", "LateRequests", "PromptsWorkload")

A_LENGTH = "a length is a number of tokens, or {uniform: [LOW, HIGH]}"
A_PRIORITY = f"a priority is a whole number to +-{MAX_PRIORITY}, a list of one each, or {{uniform: [LOW, HIGH]}}"


_AXES_OF_REQUESTS: Mapping[str, tuple[str, ...]] = {
    "synthetic": (
        "num_requests", "input_len", "output_len", "shared_prefix", "n", "tenants", "seed",
        "late.num_requests", "late.input_len", "late.output_len", "late.every",
    ),
    "prompts": ("max_tokens", "n", "tenants"),
    "trace": ("num_requests", "block_tokens", "n", "tenants", "seed"),
}  # fmt: skip

AXES: Mapping[str, tuple[str, ...]] = {
    **_AXES_OF_REQUESTS,
    "http": (
        "url", "rate", "speed", "in_flight",
        *dict.fromkeys(f"requests.{name}" for names in _AXES_OF_REQUESTS.values() for name in names),
    ),
}  # fmt: skip
"""Kind -> the fields that a list makes an axis; in others a list has a meaning of its own."""


class Length(Strict):
    """A number of tokens: fixed (low = high), or drawn uniformly from low to high, both included."""

    uniform: Annotated[list[Count], Field(min_length=2, max_length=2)]

    @field_validator("uniform")
    @classmethod
    def _ordered(cls, value: list[int]) -> list[int]:
        if value[0] > value[1]:
            raise ValueError(f"the first bound is above the second: {value}")
        return value


def _as_length(value: Any) -> Any:
    return {"uniform": [value, value]} if isinstance(value, int) and not isinstance(value, bool) else value


LengthField = Annotated[Length, BeforeValidator(_as_length)]

Rank = Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class Priorities(Strict):
    """Of requests, lower going first with `order: priority`: one each, or drawn uniformly from low to high, both
    included.
    """

    each: list[Rank] = []
    uniform: list[Rank] = []

    @model_validator(mode="after")
    def _one_form(self) -> "Priorities":
        if not self.each and (len(self.uniform) != 2 or self.uniform[0] > self.uniform[1]):
            raise ValueError(A_PRIORITY)
        return self


def _as_priorities(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"uniform": [value, value]}
    if isinstance(value, dict) and set(value) != {"uniform"}:
        raise ValueError(A_PRIORITY)
    return {"each": value} if isinstance(value, list) and value else value


PriorityField = Annotated[Priorities, BeforeValidator(_as_priorities)]


def _check_priorities(requests: RequestsT) -> RequestsT:
    """Refuses a list of priorities that is not one for each of the requests."""
    each = requests.priority.each if requests.priority is not None else []
    count = len(requests.prompts) if isinstance(requests, PromptsWorkload) else requests.num_requests
    if each and len(each) != count:
        raise ValueError(f"priority is a list of {len(each)} for {count} requests: give one, or one each")
    return requests


class _Workload(Strict):
    """`name` labels its rows. `sampling`: keys of SamplingParams, greedy where temperature is not given.

    n: completions of each request, which share its prompt's pages; at temperature 0 they are equal.
    priority: of the requests, lower going first with `order: priority`; 0 where it is not given.
    tenants: the requests are dealt to so many in turn, and share cached prefixes with their own tenant's alone.
    """

    name: str = ""
    sampling: Mapping[str, Any] = {}
    n: Count = 1
    priority: PriorityField | None = None
    tenants: Count = 1

    @field_validator("sampling")
    @classmethod
    def _valid_sampling(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key in value:
            if key not in SAMPLING_KEYS:
                raise ValueError(
                    f"unknown key {key!r}: there is {', '.join(SAMPLING_KEYS)}{suggest_name(key, SAMPLING_KEYS)}"
                )
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **value})
        return value

    @model_validator(mode="after")
    def _valid_samples(self) -> Self:
        SamplingParams(**{"temperature": 0.0, "max_tokens": None, **self.sampling, "n": self.n})
        return self


class LateRequests(Strict):
    """Requests that come while the others decode: the i-th, from 1, once those have i * every output tokens each, in
    the mean.
    """

    num_requests: Count
    input_len: LengthField
    output_len: LengthField
    every: Count
    priority: PriorityField | None = None

    _one_priority_each = model_validator(mode="after")(_check_priorities)


class SyntheticWorkload(_Workload):
    """Requests of random token ids; every request runs to its drawn length, whatever the model's end token is.

    shared_prefix: of each prompt, the share that is the beginning of one text, the same for all; the rest is its own.
    late: more requests, which share nothing. Where there are some, times to the first token are theirs, and times
    between tokens are those of the requests that came at once.
    """

    kind: Literal["synthetic"]
    num_requests: Count
    input_len: LengthField
    output_len: LengthField
    shared_prefix: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    late: LateRequests | None = None
    seed: Annotated[int, Field(strict=True, ge=0)] = 0

    _one_priority_each = model_validator(mode="after")(_check_priorities)

    @model_validator(mode="after")
    def _late_ones_meet_others(self) -> "SyntheticWorkload":
        if self.late is not None and self.late.num_requests * self.late.every >= self.output_len.uniform[0]:
            last, shortest = self.late.num_requests * self.late.every, self.output_len.uniform[0]
            raise ValueError(
                f"the last late request comes after {last} output tokens of the others (num_requests * every), when "
                f"some of them may have ended: output_len begins at {shortest}"
            )
        return self

    @property
    def longest(self) -> int:
        """The most tokens, in and out, that a request may have."""
        return max(one.input_len.uniform[1] + one.output_len.uniform[1] for one in (self, self.late or self))


class PromptsWorkload(_Workload):
    """Texts, each continued by up to max_tokens tokens."""

    kind: Literal["prompts"]
    prompts: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
    max_tokens: Count = 16

    _one_priority_each = model_validator(mode="after")(_check_priorities)


class TraceWorkload(_Workload):
    """The requests of a trace, in its order, each begun as soon as the engine has room: how fast they are served is
    measured, and not when their users came, which `tk simulate` replays.

    file: Mooncake's JSON lines (.jsonl), whose prompts agree where their hash_ids do, or an Azure trace (.csv), whose
    prompts share nothing. num_requests: the first ones; all by default. block_tokens: how many tokens stand for 512 of
    the trace's, in prompts and outputs, so that a small model serves the same pattern.
    """

    kind: Literal["trace"]
    file: Path
    num_requests: Count | None = None
    block_tokens: Annotated[int, Field(strict=True, ge=1, le=512)] = 512
    seed: Annotated[int, Field(strict=True, ge=0)] = 0

    @model_validator(mode="after")
    def _one_priority(self) -> Self:
        if self.priority is not None and self.priority.each:
            raise ValueError("a trace's requests have one priority, or {uniform: [LOW, HIGH]}")
        return self


RequestsWorkload = SyntheticWorkload | PromptsWorkload | TraceWorkload
"""What an engine here can serve."""

Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class ServiceObjective(Strict):
    """What a request's user accepts, at most: milliseconds to the first token, and the mean between tokens."""

    ttft_ms: Rate | None = None
    tpot_ms: Rate | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise ValueError("an slo has ttft_ms, tpot_ms or both")
        return self


def _read_url(url: str) -> str:
    """A server's URL, without the /v1 that OpenAI's clients have in theirs."""
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]+)?", base):
        raise ValueError(f"the url of a server is http://HOST:PORT, or https, with or without /v1; got {url!r}")
    return base


class HttpWorkload(Strict):
    """Requests for an OpenAI server that runs already, ours or another, whose speed is measured from outside.

    url: of the server, with or without /v1. served_model: what it calls the model; None is the only one that it has.
    key_file: holds its API key. requests: another workload; all but texts are sent as token ids below `vocab_size`.
    They come at once, or `rate` a second at times drawn by a Poisson process, or a trace's when it says, `speed` times
    as fast. in_flight: the most at once, the others wait here, which counts. slo: what goodput is counted by.
    """

    kind: Literal["http"]
    name: str = ""
    url: Annotated[str, AfterValidator(_read_url)]
    served_model: Annotated[str, Field(min_length=1)] | None = None
    key_file: Path | None = None
    requests: Annotated[RequestsWorkload, Field(discriminator="kind")]
    vocab_size: Count | None = None
    rate: Rate | None = None
    speed: Rate | None = None
    in_flight: Count | None = None
    slo: ServiceObjective | None = None

    @model_validator(mode="after")
    def _can_be_sent(self) -> Self:
        requests = self.requests
        if not isinstance(requests, PromptsWorkload) and self.vocab_size is None:
            raise ValueError(
                f"requests of kind {requests.kind} are token ids: vocab_size is needed, to draw them below"
            )
        if self.rate is not None and self.speed is not None:
            raise ValueError("rate and speed are two ways to say when requests come: give one")
        if self.speed is not None and not isinstance(requests, TraceWorkload):
            raise ValueError("speed is a trace's: other requests come at once, or by rate")
        if isinstance(requests, SyntheticWorkload) and requests.late is not None:
            raise ValueError("late requests wait for others' tokens, which only an engine here knows")
        if requests.n > 1:
            raise ValueError(
                "requests of n completions are not measured over HTTP: their chunks do not say whose usage"
            )
        return self


WORKLOAD_KINDS = tuple(AXES)
AnyWorkload = RequestsWorkload | HttpWorkload
Workload = Annotated[AnyWorkload, Field(discriminator="kind")]
