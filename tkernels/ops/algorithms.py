"""A variant that runs one of its op's other variants, picked at each call: from this device's timings, or by reasoning.

Its tuned config is the algorithm: tuning times each one, last of all variants and with the config that was tuned for
it, for every bucket of the key. Where nothing was tuned the choice follows from the regions that the algorithms
declare.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tkernels.config import Config
from tkernels.contract import Axes
from tkernels.device import DeviceFacts
from tkernels.launch import Run
from tkernels.names import Names
from tkernels.registry import builtin_ops
from tkernels.variant import Variant
from tkernels.workspace import Buffer

_UNTUNED = 1
"""The value of ALGORITHM that leaves the choice to reasoning; the algorithms are the values after it."""


@dataclass(frozen=True)
class Algorithms:
    """The algorithms of one op that a call may run.

    Args:
        op: Its name.
        names: The variants that tuning times. Where it found none, or one that does not support the axes, the first is
            run whose region holds them and that supports them; the last supports all that the others leave.
    """

    op: str
    names: tuple[str, ...]

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
        variants = [_variants(self.op)[name] for name in self.names]
        tuned = ([], *([one] for one in variants))[config["ALGORITHM"] - _UNTUNED]
        tried = (*tuned, *(one for one in variants if one.is_for(axes)))
        return next((one for one in tried if not one.supports(axes, device)), variants[-1])

    def workspace(self, axes: Axes, config: Config, device: DeviceFacts) -> Mapping[str, Buffer]:
        """The workspace of the variant that a call at these axes runs, with its default config."""
        variant = self.chosen(axes, config, device)
        return variant.workspace(axes, variant.default_config(device.arch), device)

    def launch(self, run: Run, *arguments: Any, **options: Any) -> None:
        """Launches the chosen variant, with its default config, on the launcher's arguments after `run`.

        That is what is checked and inspected; a `Kernel` launches the chosen variant itself, as it was tuned.
        """
        variant = self.chosen(run.axes, run.config, run.device)
        assert variant.launch is not None, "every algorithm here is launched"
        variant.launch(replace(run, config=variant.default_config(run.device.arch)), *arguments, **options)


@cache
def _variants(op: str) -> Names[Variant]:
    return builtin_ops()[op].variants
