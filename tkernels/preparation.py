"""What a weight op's variant does to a weight once, when it is loaded, and what that cost."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tkernels.contract import Axes, Case, Value
from tkernels.variant import UnsupportedError, Variant, as_it_is


@dataclass(frozen=True)
class PrepareReport:
    """The cost of preparing weights: their bytes as loaded and as kept, and the seconds that it took.

    Reports add up, so that a model's is the sum of its weights'.
    """

    bytes_before: int = 0
    bytes_after: int = 0
    seconds: float = 0.0

    def __add__(self, other: "PrepareReport") -> "PrepareReport":
        return PrepareReport(
            self.bytes_before + other.bytes_before,
            self.bytes_after + other.bytes_after,
            self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        return f"weights prepared: {before:.1f} MiB as loaded, {after:.1f} MiB as kept, in {self.seconds:.2f} s"


def prepared(variant: Variant, weight: Any) -> tuple[Any, PrepareReport]:
    """The weight as this variant wants it, and what that cost.

    Args:
        weight: Of the op's weight type, which has `nbytes` and `device`. It stays as it is; one that the variant takes
            as it is comes back itself.
    """
    made, seconds = timed_preparation(variant, weight)
    return made, PrepareReport(weight.nbytes, made.nbytes, seconds)


def timed_preparation(variant: Variant, weight: Any) -> tuple[Any, float]:
    """The weight as this variant wants it, which may be another project's object, and the seconds that it took."""
    device = torch.device(weight.device)
    _wait_for(device)
    start = time.perf_counter()
    made = variant.prepare(weight)
    _wait_for(device)
    return made, time.perf_counter() - start


def prepare_weights(variant: Variant, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments with each weight as the variant keeps it."""
    return {name: variant.prepare(one) if hasattr(one, "map_tensors") else one for name, one in arguments.items()}


def axes_as_kept(variant: Variant, axes: Axes) -> dict[str, Value]:
    """A point's axes without those that preparing its weight decides: what `supports` is asked before there is one."""
    decided = () if variant.prepare is as_it_is else variant.contract.loaded
    return {name: value for name, value in axes.items() if name not in decided}


def prepared_case(variant: Variant, case: Case) -> Case:
    """The case with its weight as the variant keeps it, which loading a model makes; `loaded` has what the definition
    reads. The case itself where the variant takes the weight as it is, or has no launcher: what it makes may be another
    project's object then, which its own function alone takes.

    Raises:
        UnsupportedError: The weight has a form that no checkpoint has, and the variant would make another of it.
        Whatever `prepare` raises.
    """
    if variant.prepare is as_it_is or variant.launch is None or case.loaded:
        return case
    made = prepare_weights(variant, case.inputs)
    loaded = {name: one for name, one in case.inputs.items() if made[name] is not one}
    if not loaded:
        return case
    for axis, value in case.contract.loaded.items():
        if case.axes.get(axis, value) != value:
            raise UnsupportedError(f"prepare gets weights as checkpoints have them: {axis}={value}")
    return replace(case, inputs=made, loaded=loaded)


def _wait_for(device: torch.device) -> None:
    """Work on a GPU goes on after the call that asked for it has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
