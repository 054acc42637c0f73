"""A request of a workload: its prompt with its sampling parameters."""

from dataclasses import dataclass

from tsched import SamplingParams


@dataclass(frozen=True)
class Request:
    """A text or token ids, and how it is continued.

    after: 0 for a request that is there from the start; another comes once those have that many output tokens each, in
    the mean. priority: lower goes first. tenant: prefixes are shared among the requests of one alone.
    """

    prompt: str | list[int]
    params: SamplingParams
    after: int = 0
    priority: int = 0
    tenant: int = 0
