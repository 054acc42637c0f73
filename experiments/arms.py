"""A sweep's arms: the product of an experiment's lists."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from experiments.schema import Experiment, SchedulerOptions, VariantChoice


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
    """One point of the sweep: the variants that are named (others are the default), and the scheduler's options.

    `swept`: the keys that differ between arms, "op" or "scheduler.option", in the YAML's order.
    """

    picks: Mapping[str, Pick]
    scheduler: Mapping[str, Any]
    swept: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The swept scheduler options."""
        return {key: value for key, value in self.scheduler.items() if f"scheduler.{key}" in self.swept}

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
    """The product of the lists under `kernels` and `scheduler`, the last list varying fastest."""
    kernels: dict[str, list[Pick]] = {
        op: list(dict.fromkeys(pick for choice in choices for pick in picks_of(choice)))
        for op, choices in experiment.kernels.items()
    }
    options: dict[str, Sequence[Any]] = {
        name: values for name in SchedulerOptions.model_fields if (values := getattr(experiment.scheduler, name))
    }
    swept = [op for op, picks in kernels.items() if len(picks) > 1]
    swept += [f"scheduler.{name}" for name, values in options.items() if len(values) > 1]
    arms = []
    for point in product(*kernels.values(), *options.values()):
        picks = dict(zip(kernels, point, strict=False))
        chosen = dict(zip(options, point[len(kernels) :], strict=True))
        arms.append(Arm(picks, chosen, tuple(swept)))
    return arms
