"""What a weight op's variant does to a weight once, when it is loaded, and what that cost."""

import time
from dataclasses import dataclass
from typing import Any

import torch

from tkernels.variant import Variant


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


def _wait_for(device: torch.device) -> None:
    """Work on a GPU goes on after the call that asked for it has returned."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
