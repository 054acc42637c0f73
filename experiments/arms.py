"""A sweep's arms: the product of an experiment's lists."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.schema import Batching, Experiment, SchedulerOptions, VariantChoice


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
class Arm:
    """One point of the sweep: the variants that are named (others are the default), the scheduler's options, and how
    requests are batched.

    `swept`: the keys that differ between arms, "op", "scheduler.option" or "batching", in the YAML's order.
    """

    picks: Mapping[str, Pick]
    scheduler: Mapping[str, Any]
    swept: tuple[str, ...]
    batching: Batching = "continuous"

    @property
    def settings(self) -> dict[str, Any]:
        """The swept scheduler options, and batching where it is swept."""
        options = {key: value for key, value in self.scheduler.items() if f"scheduler.{key}" in self.swept}
        return {**options, "batching": self.batching} if "batching" in self.swept else options

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
        return ", ".join(parts) or "the only arm"


def picks_of(choice: VariantChoice) -> Iterator[Pick]:
    """Every pinning of a choice."""
    names = sorted(choice.pins)
    for values in product(*(choice.pins[name] for name in names)):
        yield Pick(choice.variant, tuple(zip(names, values, strict=True)))


def expand(experiment: Experiment) -> list[Arm]:
    """The product of the lists under `kernels`, `scheduler` and `batching`, the last list varying fastest; of several
    sets of scheduler options, one after the other.
    """
    kernels: dict[str, list[Pick]] = {
        op: list(dict.fromkeys(pick for choice in choices for pick in picks_of(choice)))
        for op, choices in experiment.kernels.items()
    }
    swept = [op for op, picks in kernels.items() if len(picks) > 1]
    points = [
        (dict(zip(kernels, picks, strict=True)), options, batching)
        for picks in product(*kernels.values())
        for options in _options(experiment.scheduler)
        for batching in dict.fromkeys(experiment.batching)
    ]
    for name in SchedulerOptions.model_fields:
        if len({options.get(name) for _, options, _ in points}) > 1:
            swept.append(f"scheduler.{name}")
    if len(set(experiment.batching)) > 1:
        swept.append("batching")
    return [Arm(picks, options, tuple(swept), batching) for picks, options, batching in points]


def _options(sets: Sequence[SchedulerOptions]) -> Iterator[dict[str, Any]]:
    """The points of each set of options."""
    for one in sets:
        lists = {name: values for name in SchedulerOptions.model_fields if (values := getattr(one, name))}
        for point in product(*lists.values()):
            yield dict(zip(lists, point, strict=True))
