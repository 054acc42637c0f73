"""A variant that runs one of its op's other variants, picked at each call: from this device's timings, or by reasoning.

Its tuned config is the algorithm: tuning times each one, last of all variants and with the config that the project's
own lockfile has for it, for every bucket of the key. Where nothing was tuned the choice follows from which resource is
scarce.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.launch import Run
from tkernels.names import Names
from tkernels.registry import builtin_ops
from tkernels.tuning import NEAREST
from tkernels.variant import Variant
from tkernels.workspace import Buffer

_UNTUNED = 1
"""The value of ALGORITHM that leaves the choice to reasoning; the algorithms are the values after it."""

SPLIT_K_TOKENS = 64
"""By reasoning: so many tokens are one row of tiles, far fewer than fill a device, unless K is split."""


def split_k_or_tiled(axes: Axes, tuned: tuple[str, ...]) -> tuple[str, ...]:
    """What to try, where an op has these two: one that does not take so many tokens gives way to the default."""
    return (*tuned, "split_k" if int(axes["M"]) <= SPLIT_K_TOKENS else "tiled")


@dataclass(frozen=True)
class Algorithms:
    """The algorithms of one op that a call may run.

    Args:
        op: Its name.
        names: The variants that tuning times.
        in_order: (axes, what tuning found: one name or none) -> the variants to try; the first that supports the axes
            is run, and the last of them supports all that are left.
    """

    op: str
    names: tuple[str, ...]
    in_order: Callable[[Axes, tuple[str, ...]], Sequence[str]]

    @property
    def configs(self) -> tuple[Config, ...]:
        return tuple(Config(ALGORITHM=_UNTUNED + 1 + index) for index in range(len(self.names)))

    @property
    def default(self) -> Mapping[str, Config]:
        return {"": Config(ALGORITHM=_UNTUNED)}

    @property
    def limits(self) -> Mapping[str, tuple[int, int]]:
        return {"ALGORITHM": (_UNTUNED, _UNTUNED + len(self.names))}

    def chosen(self, axes: Axes, config: Config, device: DeviceFacts) -> Variant:
        """The variant that a call at these axes runs."""
        wanted = config["ALGORITHM"] - _UNTUNED - 1
        *others, last = self.in_order(axes, () if wanted < 0 else (self.names[wanted],))
        variants = _variants(self.op)
        return next((variants[name] for name in others if not variants[name].supports(axes, device)), variants[last])

    def workspace(self, axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
        """The workspace of the variant that a call at these axes runs."""
        variant = self.chosen(axes, config, device)
        return variant.workspace(axes, NEAREST.resolve(variant, axes, device), device)

    def launch(self, run: Run, axes: Axes, *arguments: Any) -> None:
        """Launches the chosen variant with its own config on the launcher's arguments after `run`."""
        variant = self.chosen(axes, run.config, run.device)
        assert variant.launch is not None, "every algorithm here is launched"
        variant.launch(replace(run, config=NEAREST.resolve(variant, axes, run.device)), *arguments)


@cache
def _variants(op: str) -> Names[Variant]:
    return builtin_ops()[op].variants
