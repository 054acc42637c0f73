"""StackedWeight: the quantized weights of all experts of a layer as one."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from tkernels.quantized import scaled_weight
from tkernels.quantized.codes import Order, codes_per_word, low_bits, reordered
from tkernels.quantized.slicing import zeros_of
from tkernels.quantized.stacked_scaled import StackedScaledWeight, check_count
from tkernels.quantized.weight import Coding, QuantizedWeight, dequantize

_PARTS = ("packed", "high", "scales", "zeros", "permutation")


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """E QuantizedWeights of one structure, with scales and without outliers: see there what its parts mean.

    Attributes:
        packed: [E, Kp / codes_per_word, N] int32.
        scales: [E, G, N] floating.
        zeros: [E, G, N] int16, or None.
        high: [E, Kp / 32, N] int32, or None.
        permutation: [E, Kp] int32, or None: each expert's own.
        bits, group_size, order, inputs, e2m1: Of all of them.

    Within an expert offsets are below 2**31; from expert to expert they are not: 128 experts pass 2**31 bytes early.

    Raises:
        ValueError: Parts of unlike numbers of experts, or what QuantizedWeight refuses of the first expert's.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int = 4
    group_size: int = 128
    order: Order = "sequential"
    high: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    inputs: int = -1
    e2m1: bool = False

    def __post_init__(self) -> None:
        experts = self.packed.shape[0]
        for name, part in self.parts():
            if part.dim() != (2 if name == "permutation" else 3) or part.shape[0] != experts or experts == 0:
                raise ValueError(
                    f"StackedWeight: {name} has shape {[*part.shape]}; one part for each of {experts} experts is needed"
                )
        first = self.expert(0)
        object.__setattr__(self, "group_size", first.group_size)
        object.__setattr__(self, "inputs", first.inputs)

    def expert(self, number: int) -> QuantizedWeight:
        """One expert's weight, whose parts are views of these."""
        parts: dict[str, Any] = {name: part[number] for name, part in self.parts()}
        return QuantizedWeight(
            parts["packed"],
            parts["scales"],
            parts.get("zeros"),
            self.bits,
            self.group_size,
            self.order,
            high=parts.get("high"),
            permutation=parts.get("permutation"),
            inputs=self.inputs,
            e2m1=self.e2m1,
        )

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are there, by name."""
        for name in _PARTS:
            part = getattr(self, name)
            if part is not None:
                yield name, part

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K), as the dense weights'."""
        return int(self.packed.shape[0]), int(self.packed.shape[2]), self.inputs

    @property
    def places(self) -> int:
        """Kp, the inputs and the padding."""
        return int(self.packed.shape[1]) * codes_per_word(self.bits)

    @property
    def coding(self) -> Coding:
        return "e2m1" if self.e2m1 else "uniform"

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def dtype(self) -> torch.dtype:
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for _, part in self.parts())

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """What a contract looks at, hashable: all but the contents, which no check reads."""
        parts = ((name, t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for name, t in self.parts())
        return (self.bits, self.group_size, self.order, self.inputs, self.e2m1, *parts)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All parts, in the order of `parts`: what a launch asks for their addresses."""
        return tuple(part for _, part in self.parts())

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StackedWeight":
        """The weight with `function` applied to each of its tensors."""
        changed: dict[str, Any] = {name: function(part) for name, part in self.parts()}
        return replace(self, **changed)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "StackedWeight":
        """The weight on another device, its floating parts in another dtype."""
        return self.map_tensors(lambda part: part.to(device, dtype if part.is_floating_point() else None))


def stack(weights: Iterable[QuantizedWeight], num_experts: int) -> StackedWeight:
    """Experts' weights as one, bit for bit.

    Each is written into its place before the next is taken, so of weights that are made one by one two copies are in
    memory of one expert alone. Zero-points are kept where an expert has some that are not in the middle, and
    permutations where one has codes in another order than inputs.

    Args:
        weights: `num_experts` of them.
        num_experts: E.

    Raises:
        ValueError: More weights or fewer than experts; or an expert that is quantized unlike the first, or in a way
            that is not stacked: which, and what.
    """
    like: QuantizedWeight | None = None  # the first in all but its contents
    parts: dict[str, torch.Tensor] = {}
    number = -1
    for number, weight in enumerate(weights):
        check_count(number + 1, num_experts, has_ended=False)
        like = _without_contents(weight) if like is None else like
        if reason := _unlike(like, weight):
            raise ValueError(f"expert {number} cannot stand beside expert 0: {reason}")
        for name in _PARTS:
            part: torch.Tensor | None = getattr(weight, name)
            if part is not None and name not in parts:
                parts[name] = part.new_empty((num_experts, *part.shape))
                if number:
                    parts[name][:number] = _implied(name, weight)
            if name in parts:
                parts[name][number] = _implied(name, weight) if part is None else part
        del weight, part
    check_count(number + 1, num_experts, has_ended=True)
    assert like is not None, "there are experts"
    alike: dict[str, Any] = {name: getattr(like, name) for name in ("bits", "group_size", "order", "inputs", "e2m1")}
    made: dict[str, Any] = {name: parts.get(name) for name in _PARTS}
    return StackedWeight(**made, **alike)


def _without_contents(weight: QuantizedWeight) -> QuantizedWeight:
    return weight.map_tensors(lambda part: part.to("meta"))


def _implied(name: str, weight: QuantizedWeight) -> torch.Tensor:
    """The zero-points or the permutation that a weight without them stands for."""
    if name == "zeros":
        return zeros_of(replace(weight, zeros=None))
    return torch.arange(weight.places, dtype=torch.int32, device=weight.device)


def _unlike(first: QuantizedWeight, weight: QuantizedWeight) -> str | None:
    """What keeps a weight from being stacked upon the first; None where nothing does."""
    if weight.table is not None or weight.outliers is not None:
        return "codes with a table or outliers beside them are not stacked"
    for name in ("shape", "places", "bits", "coding", "group_size", "dtype", "order"):
        mine, theirs = getattr(first, name), getattr(weight, name)
        if mine != theirs:
            return f"its {name} is {theirs}, not {mine}"
    return None


def interleaved_experts(weight: Any) -> Any:
    """The same weight with its codes interleaved, as kernels read them; a dense one as it is."""
    if not isinstance(weight, StackedWeight) or weight.order == "interleaved":
        return weight
    order: Order = "interleaved"
    high = None if weight.high is None else reordered(weight.high, 1, order)
    return replace(weight, packed=reordered(weight.packed, low_bits(weight.bits), order), high=high, order=order)


def dequantize_expert(
    weight: StackedWeight | StackedScaledWeight, number: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """One expert's dense weight [N, K] in `dtype` (the weight's own by default; float32 of e4m3), rounded once."""
    if isinstance(weight, StackedScaledWeight):
        return scaled_weight.dequantize(weight.expert(number), dtype or torch.float32)
    return dequantize(weight.expert(number), dtype)


def dequantize_experts(weight: StackedWeight | StackedScaledWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The dense weights [E, N, K] as `dequantize_expert`'s."""
    return torch.stack([dequantize_expert(weight, number, dtype) for number in range(weight.shape[0])])
