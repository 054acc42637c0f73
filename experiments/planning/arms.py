"""A sweep's arms: what differs between them, and what each serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.schema import AnyWorkload, Batching, HttpWorkload, RequestsWorkload


@dataclass(frozen=True)
class Pick:
    """One variant with the values that its config is pinned to."""

    variant: str
    pins: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """ "split_kv[num_splits=4]", as tkernels labels it."""
        pins = ",".join(f"{name}={value}" for name, value in sorted(self.pins))
        return f"{self.variant}[{pins}]" if pins else self.variant

    @property
    def choice(self) -> str | Mapping[str, Mapping[str, int]]:
        """As tkernels.select takes it."""
        return {self.variant: dict(self.pins)} if self.pins else self.variant


@dataclass(frozen=True)
class ServedWorkload:
    """One point of an entry of `workload`.

    Attributes:
        settings: Its swept fields, {"workload.num_requests": 8}; name and settings together tell it from the others.
        entry: The index of the entry.
    """

    name: str
    settings: Mapping[str, Any]
    workload: AnyWorkload
    entry: int = 0

    @property
    def requests(self) -> RequestsWorkload:
        """What is asked for, whoever serves it."""
        return self.workload.requests if isinstance(self.workload, HttpWorkload) else self.workload

    @property
    def title(self) -> str:
        """For people: "long, num_requests=8"."""
        swept = (f"{key.removeprefix('workload.')}={value}" for key, value in self.settings.items())
        return ", ".join([*filter(None, [self.name]), *swept])


@dataclass(frozen=True)
class Arm:
    """One point of the sweep: the variants that are named (others are the default), the scheduler's options, how
    requests are batched, and the workloads that this engine serves.

    Attributes:
        swept: The keys that differ between arms, "op", "scheduler.option", "batching", "model" or "dtype".
        http_workloads: What servers elsewhere serve: the same for all arms.
        model, dtype: What they are called, where they are swept.
    """

    picks: Mapping[str, Pick]
    scheduler: Mapping[str, Any]
    swept: tuple[str, ...]
    batching: Batching = "continuous"
    model: str | None = None
    dtype: str | None = None
    workloads: tuple[ServedWorkload, ...] = ()
    http_workloads: tuple[ServedWorkload, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Whatever is swept and no kernel: model, dtype, scheduler options by their names, batching."""
        outer = {"model": self.model, "dtype": self.dtype}
        given: dict[str, Any] = {key: value for key, value in outer.items() if value is not None}
        given |= {key: value for key, value in self.scheduler.items() if f"scheduler.{key}" in self.swept}
        return {**given, "batching": self.batching} if "batching" in self.swept else given

    @property
    def choices(self) -> dict[str, Any]:
        return {op: pick.choice for op, pick in self.picks.items()}

    @property
    def labels(self) -> dict[str, str]:
        return {op: pick.label for op, pick in sorted(self.picks.items())}

    @property
    def title(self) -> str:
        """What tells it from the other arms, for people: "one_pass, fused"."""
        parts = [self.picks[key].label for key in self.swept if key in self.picks]
        parts += [f"{key}={value}" for key, value in self.settings.items()]
        return ", ".join(parts) or ("defaults" if self.swept else "the only arm")
