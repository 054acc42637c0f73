"""StackedScaledWeight: the weights of all experts of a layer in e4m3 codes, a scale for each block, as one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tkernels.quantized.row_codes import BLOCK
from tkernels.quantized.scaled_weight import ScaledWeight


@dataclass(frozen=True, eq=False)
class StackedScaledWeight:
    """E ScaledWeights of one shape, of blocks: see there what its parts mean. Their inputs stay as they are:

        W[e, n, k] = values[e, n, k] * scales[e, n // 128, k // 128]

    Attributes:
        values: [E, N, K] float8_e4m3fn, unit stride in the last dim.
        scales: [E, ceil(N / 128), K / 128] float32, likewise.

    Raises:
        ValueError: Parts of unlike numbers of experts, scales that are not of blocks, or what ScaledWeight refuses of
            the first expert's.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        experts = self.values.shape[0]
        for name, part in self.parts():
            if part.dim() != 3 or part.shape[0] != experts or experts == 0:
                raise ValueError(
                    f"StackedScaledWeight: {name} has shape {[*part.shape]}; one part for each of {experts} experts is "
                    "needed"
                )
        self.expert(0)

    def expert(self, number: int) -> ScaledWeight:
        """One expert's weight, whose parts are views of these."""
        return ScaledWeight(self.values[number], self.scales[number])

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by name."""
        yield "values", self.values
        yield "scales", self.scales

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), as the dense weights'."""
        experts, outputs, inputs = self.values.shape
        return experts, outputs, inputs

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of both parts."""
        return self.values.nbytes + self.scales.nbytes

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What a contract looks at, hashable: all but the contents, which no check reads."""
        return tuple((t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for _, t in self.parts())

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Both parts, in the order of `parts`: what a launch asks for their addresses."""
        return self.values, self.scales

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StackedScaledWeight":
        """The weight with `function` applied to each of its tensors."""
        return StackedScaledWeight(function(self.values), function(self.scales))

    def to(self, device: torch.device | str) -> "StackedScaledWeight":
        """The weight on another device."""
        return self.map_tensors(lambda part: part.to(device))


def stack_scaled(weights: Iterable[ScaledWeight], num_experts: int) -> StackedScaledWeight:
    """Experts' weights as one, bit for bit.

    Each is written into its place before the next is taken, so of weights that are made one by one two copies are in
    memory of one expert alone.

    Args:
        weights: `num_experts` of them.
        num_experts: E.

    Raises:
        ValueError: More weights or fewer than experts; or an expert of another shape than the first, or whose scales
            are not of blocks: which, and what.
    """
    values = scales = None
    number = -1
    for number, weight in enumerate(weights):
        check_count(number + 1, num_experts, has_ended=False)
        if not weight.is_blocked:
            raise ValueError(f"expert {number}: its scales are not of blocks of {BLOCK} x {BLOCK}, and are not stacked")
        if values is None or scales is None:
            values = weight.values.new_empty((num_experts, *weight.values.shape))
            scales = weight.scales.new_empty((num_experts, *weight.scales.shape))
        if weight.shape != values.shape[1:]:
            raise ValueError(
                f"expert {number} cannot stand beside expert 0: its shape is {weight.shape}, not {(*values.shape[1:],)}"
            )
        values[number], scales[number] = weight.values, weight.scales
        del weight
    check_count(number + 1, num_experts, has_ended=True)
    assert values is not None, "there are experts"
    assert scales is not None, "there are experts"
    return StackedScaledWeight(values, scales)


def check_count(given: int, num_experts: int, has_ended: bool) -> None:
    """Raises ValueError where more weights are given than there are experts, or fewer when the last was, or none."""
    if given > num_experts or (has_ended and given < max(1, num_experts)):
        raise ValueError(f"weights of {given} experts{'' if has_ended else ' or more'} are given for {num_experts}")
