"""QuantizedWeight: a linear layer's weight as short codes, and what they stand for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from tkernels.contract import is_aligned
from tkernels.quantized.codes import (
    BITS,
    ORDERS,
    Order,
    codes_in,
    codes_per_row,
    codes_per_word,
    low_bits,
    pack_codes,
    reordered,
)
from tkernels.quantized.outliers import Outliers

Coding = Literal["uniform", "e2m1", "lookup"]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""What codes of 4 bits stand for that are floats of 2 bits of exponent and one of mantissa: sign first, no infinities.

Source: Open Compute Project, Microscaling Formats (MX) Specification 1.0, 2023, section 5.3.3.
"""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """W[n, k] for N outputs and K inputs, of which Kp places of codes, in G = Kp / group_size groups, keep the most:

        W[n, k] = (code[p, n] - zero[p // group_size, n]) * scale[p // group_size, n] + outlier[n, k]    uniform
        W[n, k] = e2m1(code[p, n]) * scale[p // group_size, n] + outlier[n, k]                           e2m1
        W[n, k] = table[code[p, n], n] + outlier[n, k]                                                   lookup

    for the place p with permutation[p] = k; without a permutation p = k and Kp = K.

    Attributes:
        packed: [Kp / codes_per_word, N] int32, as in codes.py, in `order`; of 3-bit codes the two low bits.
        high: [Kp / 32, N] int32, the third bits of 3-bit codes; else None.
        scales: [G, N] floating; None for a lookup.
        zeros: [G, N] int16; None (symmetric) stands for 2**(bits - 1) everywhere. Not packed: a GPTQ file of format v1
            can mean 16 at 4 bits and 256 at 8.
        table: [2**bits, N] floating, each output's own values (SqueezeLLM: Kim et al., 2023); None for uniform codes.
        permutation: [Kp] int32, the input that each place stands for, each input once; -1 is padding, whose code counts
            nothing. GPTQ's activation order (Frantar et al., 2023) puts inputs of one group side by side by it.
        outliers: Weights kept beside the codes, of the scales' or table's dtype; None where there are none.
        bits: 2, 3, 4 or 8.
        group_size: Places that share a scale, whole words of them, a divisor of Kp; -1 means all.
        order: Of the codes in a word: "sequential", as checkpoints have them (the first place in the lowest bits), or
            "interleaved", as the kernels here read them (see codes.py). `interleaved` and `sequential` make one of the
            other.
        inputs: K; -1 means Kp.
        e2m1: Whether codes of 4 bits are not integers but floats: see `E2M1_VALUES`.

    At 4 bits and group size 128 a weight with zero-points takes 0.266 times the bytes of bf16. The two-dimensional
    parts have unit stride in the last dim.

    Raises:
        ValueError: Parts whose shapes, dtypes or strides do not fit together, parts of both codings or of none, an
            unknown order, or a packed part of 2**31 words (8 GB).
    """

    packed: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    bits: int = 4
    group_size: int = 128
    order: Order = "sequential"
    high: torch.Tensor | None = None
    table: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    outliers: Outliers | None = None
    inputs: int = -1
    e2m1: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"QuantizedWeight: bits must be one of {', '.join(map(str, BITS))}, got {self.bits!r}")
        if self.order not in ORDERS:
            raise ValueError(f"QuantizedWeight: order must be {' or '.join(ORDERS)}, got {self.order!r}")
        for name, part in self.own_parts():
            _check_part(name, part)
        self._check_coding()
        self._check_words()
        places, outputs = self.places, self.packed.shape[1]
        if self.group_size == -1:
            object.__setattr__(self, "group_size", places)
        check_group_size(self.group_size, places, self.bits)
        if self.inputs == -1:
            object.__setattr__(self, "inputs", places)
        if self.permutation is None and self.inputs != places:
            raise ValueError(f"QuantizedWeight: {self.inputs} inputs without a permutation, but {places} codes")
        self._check_shapes(places, outputs)

    def _check_words(self) -> None:
        row = codes_per_row(self.bits)
        if self.packed.numel() == 0 or self.places % row:
            raise ValueError(
                f"QuantizedWeight: packed has shape {[*self.packed.shape]}; [Kp/{codes_per_word(self.bits)}, N] with N "
                f"positive and Kp a positive multiple of {row} is needed for {self.bits} bits"
            )
        for name, part in self.own_parts():
            if name in ("packed", "high", "table") and (part.shape[0] - 1) * part.stride(0) + part.shape[1] >= 2**31:
                raise ValueError(
                    f"QuantizedWeight: {name} spans 2**31 {'values' if name == 'table' else 'words'} or more (shape "
                    f"{[*part.shape]}, strides {part.stride()}), which the kernels' 32-bit offsets do not reach"
                )

    def _check_shapes(self, places: int, outputs: int) -> None:
        groups = places // self.group_size
        shapes = {
            "high": ("[Kp/32, N]", [places // 32, outputs]),
            "scales": ("[K / group_size, N]", [groups, outputs]),
            "zeros": ("[K / group_size, N]", [groups, outputs]),
            "table": ("[2**bits, N]", [2**self.bits, outputs]),
            "permutation": ("[Kp]", [places]),
        }
        for name, part in self.own_parts():
            if name in shapes and list(part.shape) != shapes[name][1]:
                dims, shape = shapes[name]
                raise ValueError(f"QuantizedWeight: {name} has shape {list(part.shape)}, not {shape} = {dims}")
        if self.outliers is not None and self.outliers.num_outputs != outputs:
            raise ValueError(f"QuantizedWeight: outliers of {self.outliers.num_outputs} outputs, not {outputs}")

    def _check_coding(self) -> None:
        if (self.scales is None) == (self.table is None):
            raise ValueError("QuantizedWeight: it needs either scales or a table")
        if self.table is not None and self.zeros is not None:
            raise ValueError("QuantizedWeight: a table's codes have no zeros")
        if self.e2m1 and (self.bits != 4 or self.table is not None or self.zeros is not None):
            raise ValueError("QuantizedWeight: e2m1 codes have 4 bits, scales and no zeros")
        if (self.high is not None) != (self.bits == 3):
            raise ValueError(f"QuantizedWeight: high keeps the third bits of 3-bit codes, and these have {self.bits}")
        if self.outliers is not None and self.outliers.vals.dtype != self.dtype:
            raise ValueError(f"QuantizedWeight: outliers are {self.outliers.vals.dtype}, and the rest is {self.dtype}")

    def own_parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are there, by name; not those of `outliers`."""
        for name in ("packed", "high", "scales", "zeros", "table", "permutation"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, by name: "outliers.cols" those of `outliers`."""
        yield from self.own_parts()
        if self.outliers is not None:
            for name in ("rows", "cols", "vals"):
                yield f"outliers.{name}", getattr(self.outliers, name)

    @property
    def places(self) -> int:
        """Kp, the inputs and the padding."""
        return int(self.packed.shape[0]) * codes_per_word(self.bits)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as the dense weight's."""
        return int(self.packed.shape[1]), self.inputs

    @property
    def coding(self) -> Coding:
        if self.table is not None:
            return "lookup"
        return "e2m1" if self.e2m1 else "uniform"

    @property
    def symmetric(self) -> bool:
        return self.zeros is None and self.table is None

    @property
    def dtype(self) -> torch.dtype:
        """Of the scales, or of the table."""
        values = self.scales if self.table is None else self.table
        assert values is not None
        return values.dtype

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

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """The weight with `function` applied to each of its tensors, the outliers' too."""
        changed: dict[str, Any] = {name: function(part) for name, part in self.own_parts()}
        outliers = None if self.outliers is None else self.outliers.map_tensors(function)
        return replace(self, **changed, outliers=outliers)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "QuantizedWeight":
        """The weight on another device, its floating parts in another dtype."""
        return self.map_tensors(lambda part: part.to(device, dtype if part.is_floating_point() else None))


def _check_part(name: str, part: torch.Tensor) -> None:
    floating, dims = name in ("scales", "table"), 1 if name == "permutation" else 2
    integer = torch.int16 if name == "zeros" else torch.int32
    if not (part.is_floating_point() if floating else part.dtype is integer):
        wanted = "a floating dtype" if floating else str(integer).removeprefix("torch.")
        raise ValueError(f"QuantizedWeight: {name} must have {wanted}, got {part.dtype}")
    if part.dim() != dims:
        raise ValueError(f"QuantizedWeight: {name} must have {'one dim' if dims == 1 else 'two dims'}, got shape "
                         f"{list(part.shape)}")  # fmt: skip
    if part.shape[-1] > 1 and part.stride(-1) != 1:
        raise ValueError(f"QuantizedWeight: {name} needs unit stride in its last dim, got {part.stride()}")


def check_group_size(group_size: int, places: int, bits: int) -> None:
    """ValueError where groups of `group_size` are not whole rows of words, or do not make up Kp = `places`."""
    row = codes_per_row(bits)
    if group_size < row or group_size % row or places % group_size:
        raise ValueError(
            f"QuantizedWeight: group_size must be -1 or a multiple of {row} that divides K = {places}, got "
            f"{group_size} at {bits} bits"
        )


def from_codes(
    codes: torch.Tensor,
    bits: int,
    *,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    group_size: int = -1,
    table: torch.Tensor | None = None,
    permutation: torch.Tensor | None = None,
    outliers: Outliers | None = None,
) -> QuantizedWeight:
    """A sequential weight of codes [Kp, N], integers below 2**bits, by place. The rest as in QuantizedWeight; zeros may
    be of any integer dtype, and K is the number of places that the permutation does not call padding.
    """
    packed, high = pack_codes(codes, bits)
    return QuantizedWeight(
        packed,
        scales,
        None if zeros is None else zeros.to(torch.int16),
        bits,
        group_size,
        "sequential",
        high,
        table,
        permutation,
        outliers,
        -1 if permutation is None else int((permutation >= 0).sum()),
    )


def unpack_codes(weight: QuantizedWeight) -> torch.Tensor:
    """[Kp, N] uint8, the codes by place."""
    return codes_in(weight.packed, weight.high, weight.bits, weight.order)


def in_order(weight: QuantizedWeight, order: Order) -> QuantizedWeight:
    """The same weight with its words' codes in that order."""
    if weight.order == order:
        return weight
    high = None if weight.high is None else reordered(weight.high, 1, order)
    return replace(weight, packed=reordered(weight.packed, low_bits(weight.bits), order), high=high, order=order)


def interleaved(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its codes interleaved: what the Triton variants of dequant_gemm read.

    Of one that is not, parts that are views become tensors of their own, unless all their rows begin on 16 bytes.
    """
    if weight.order == "interleaved":
        return weight

    def begun_on_16_bytes(part: torch.Tensor) -> torch.Tensor:
        return part if is_aligned(part) else part.clone(memory_format=torch.contiguous_format)

    return in_order(weight, "interleaved").map_tensors(begun_on_16_bytes)


def sequential(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its codes in the order of a checkpoint."""
    return in_order(weight, "sequential")


def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The dense weight [N, K] in `dtype` (the weight's own by default), computed in float32 or wider, rounded once."""
    dtype = dtype or weight.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if weight.outliers is not None and weight.scales is not None and weight.dtype == torch.float32:
        wide = torch.float64  # a product rounded to fp32 would be rounded again as a sum
    codes = unpack_codes(weight)  # [Kp, N]
    if weight.table is not None:
        dense = weight.table.to(wide).gather(0, codes.long())  # [Kp, N]
    else:
        assert weight.scales is not None
        grouped = codes.unflatten(0, (-1, weight.group_size))  # [G, group_size, N]
        if weight.e2m1:
            numbers = torch.tensor(E2M1_VALUES, dtype=wide, device=weight.device)[grouped.long()]
        else:
            zeros = 2 ** (weight.bits - 1) if weight.zeros is None else weight.zeros.to(wide).unsqueeze(1)  # [G, 1, N]
            numbers = grouped.to(wide) - zeros
        dense = (numbers * weight.scales.to(wide).unsqueeze(1)).flatten(0, 1)  # [Kp, N]
    if weight.permutation is not None:
        counts = weight.permutation >= 0
        placed = torch.zeros((weight.inputs, dense.shape[1]), dtype=wide, device=weight.device)
        placed[weight.permutation[counts].long()] = dense[counts]
        dense = placed
    rounded = dense.to(dtype)  # [K, N]
    if weight.outliers is not None:
        rows, cols = weight.outliers.outputs(), weight.outliers.cols.long()
        sums = dense[cols, rows].double() + weight.outliers.vals.double()  # a sum in fp32 would round a second time
        rounded[cols, rows] = sums.to(dtype)
    return rounded.t()
