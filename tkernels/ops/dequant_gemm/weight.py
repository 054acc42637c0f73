"""QuantizedWeight: a linear layer's weight as 4-bit codes with a scale and a zero-point for each group of inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch

from tkernels.contract import Axes, ContractError, Tensor, Value

CODES_PER_WORD = 8
"""4-bit codes in an int32 word."""

Order = Literal["sequential", "interleaved"]
"""Where a word keeps its eight codes. See QuantizedWeight."""

ORDERS: tuple[Order, ...] = get_args(Order)

INTERLEAVED = (1, 3, 5, 7, 0, 2, 4, 6)
"""The code that each nibble of an interleaved word holds, lowest bits first."""


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """W[n, k] = (code[k, n] - zero[k // group_size, n]) * scale[k // group_size, n], for N outputs and K inputs.

    packed: [K/8, N] int32: word [r, n] holds the codes of k = 8r .. 8r + 7, in `order`.
    scales: [G, N] floating, G = K / group_size groups.
    zeros: [G, N/8] int32, packed along N in the same way; None (symmetric) stands for 2**(bits - 1) everywhere.
    bits: 4. group_size: inputs that share a scale, a multiple of 8 that divides K; -1 means all K of them.
    order: of a word's codes, lowest bits first: "sequential", or "interleaved", which has the odd ones (1, 3, 5, 7) in
        the low half and the even ones in the high half, so that one shift and one mask give two neighbours, each in 16
        bits of its own (Kim et al., 2022, "Who Says Elephants Can't Run"). `zeros` stay sequential.

    A sequential weight is GPTQ's (Frantar et al., 2023) with zero-points as they are, not less one. At group size 128 a
    weight takes 0.26 times the bytes of bf16. Unit stride in the last dim of each tensor.

    Raises:
        ValueError: parts whose shapes, dtypes or strides do not fit together, an unknown order, or a packed part of
            2**31 words (8 GB).
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int = 4
    group_size: int = 128
    order: Order = "sequential"

    def __post_init__(self) -> None:
        if self.bits != 4:
            raise ValueError(f"QuantizedWeight: bits must be 4, got {self.bits!r}")
        if self.order not in ORDERS:
            raise ValueError(f"QuantizedWeight: order must be {' or '.join(ORDERS)}, got {self.order!r}")
        parts = {"packed": self.packed, "scales": self.scales}
        if self.zeros is not None:
            parts["zeros"] = self.zeros
        for name, part in parts.items():
            wanted = "a floating dtype" if name == "scales" else "int32"
            if not (part.is_floating_point() if name == "scales" else part.dtype is torch.int32):
                raise ValueError(f"QuantizedWeight: {name} must have {wanted}, got {part.dtype}")
            if part.dim() != 2:
                raise ValueError(f"QuantizedWeight: {name} must have two dims, got shape {list(part.shape)}")
            if part.shape[1] > 1 and part.stride(1) != 1:
                raise ValueError(f"QuantizedWeight: {name} needs unit stride in its last dim, got {part.stride()}")
        (outputs, inputs), words = self.shape, list(self.packed.shape)
        if inputs == 0 or outputs == 0 or outputs % CODES_PER_WORD:
            raise ValueError(
                f"QuantizedWeight: packed has shape {words}; [K/8, N] with K and N positive multiples of 8 is needed"
            )
        if (words[0] - 1) * self.packed.stride(0) + words[1] >= 2**31:
            raise ValueError(
                f"QuantizedWeight: packed spans 2**31 words or more (shape {words}, strides {self.packed.stride()}), "
                "which the kernels' 32-bit offsets do not reach"
            )
        if self.group_size == -1:
            object.__setattr__(self, "group_size", inputs)
        _check_group_size(self.group_size, inputs)
        groups = inputs // self.group_size
        shapes = {"scales": ("[K / group_size, N]", [groups, outputs])}
        shapes["zeros"] = ("[K / group_size, N/8]", [groups, outputs // CODES_PER_WORD])
        for name, (dims, shape) in shapes.items():
            if name in parts and list(parts[name].shape) != shape:
                raise ValueError(f"QuantizedWeight: {name} has shape {list(parts[name].shape)}, not {shape} = {dims}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as the dense weight's."""
        return self.packed.shape[1], self.packed.shape[0] * CODES_PER_WORD

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    @property
    def dtype(self) -> torch.dtype:
        """The scales' dtype."""
        return self.scales.dtype

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in (self.packed, self.scales, self.zeros) if part is not None)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "QuantizedWeight":
        """The weight with `function` applied to each of its tensors."""
        zeros = None if self.zeros is None else function(self.zeros)
        return replace(self, packed=function(self.packed), scales=function(self.scales), zeros=zeros)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The weight on another device."""
        return self.map_tensors(lambda tensor: tensor.to(device))


def _check_group_size(group_size: int, inputs: int) -> None:
    if group_size < CODES_PER_WORD or group_size % CODES_PER_WORD or inputs % group_size:
        raise ValueError(
            f"QuantizedWeight: group_size must be -1 or a multiple of 8 that divides K = {inputs}, got {group_size}"
        )


def pack(codes: torch.Tensor, dim: int) -> torch.Tensor:
    """Integer codes 0 to 15, of any shape, packed along `dim`, eight to an int32 word, lowest bits first."""
    words = codes.long().unflatten(dim, (-1, CODES_PER_WORD)).movedim(dim % codes.dim() + 1, -1)
    shifts = 4 * torch.arange(CODES_PER_WORD, device=codes.device)
    unsigned = (words << shifts).sum(-1)  # disjoint bits: the sum is their union, in 0 .. 2**32 - 1
    return (unsigned - ((unsigned >> 31) << 32)).int()


def unpack(words: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `pack`: int32 codes 0 to 15, eight times as many along `dim`."""
    shifts = 4 * torch.arange(CODES_PER_WORD, device=words.device, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & 15  # the shift is arithmetic; the mask drops the sign's copies
    dim = dim % words.dim()
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1)


def _swapped(words: torch.Tensor, mask: int, distance: int) -> torch.Tensor:
    """The words with the bits in `mask` and those `distance` above them in each other's place."""
    moved = (words ^ (words >> distance)) & mask
    return words ^ moved ^ (moved << distance)


def interleaved(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its codes interleaved: what the Triton variants of dequant_gemm read."""
    if weight.order == "interleaved":
        return weight
    # In each half of a word the middle nibbles change places, then in the word the middle bytes, then its halves:
    # 01234567 -> 02134657 -> 02461357 -> 13570246. On whole words: scratch of the weight's size, not of its codes'.
    words = _swapped(_swapped(_swapped(weight.packed, 0x00F000F0, 4), 0x0000FF00, 8), 0x0000FFFF, 16)
    return replace(weight, packed=words, order="interleaved")


def sequential(weight: QuantizedWeight) -> QuantizedWeight:
    """The same weight with its codes in the order of a checkpoint."""
    if weight.order == "sequential":
        return weight
    words = _swapped(_swapped(_swapped(weight.packed, 0x0000FFFF, 16), 0x0000FF00, 8), 0x00F000F0, 4)
    return replace(weight, packed=words, order="sequential")


def quantize(
    weight: torch.Tensor,
    bits: int = 4,
    group_size: int = 128,
    *,
    symmetric: bool = False,
    dtype: torch.dtype | None = None,
) -> QuantizedWeight:
    """Round-to-nearest quantization, each group by its own range.

    Args:
        weight: [N, K], any float dtype, finite; N and K multiples of 8.
        bits: 4.
        group_size: as in QuantizedWeight.
        symmetric: the range is [-max|w|, max|w|] and no zero-points are stored; otherwise it is [min(w, 0), max(w, 0)].
        dtype: of the scales; `weight`'s by default.

    Returns:
        A weight within half a step, plus the rounding of the scale, of the given one.
    """
    if bits != 4:
        raise ValueError(f"quantize: bits must be 4, got {bits!r}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"quantize: weight must be floating [N, K], got {weight.dtype} {list(weight.shape)}")
    outputs, inputs = weight.shape
    if outputs % CODES_PER_WORD or inputs % CODES_PER_WORD:
        raise ValueError(f"quantize: N = {outputs} and K = {inputs} must be multiples of {CODES_PER_WORD}")
    group_size = inputs if group_size == -1 else group_size
    _check_group_size(group_size, inputs)
    top = 2**bits - 1
    wide = weight.double() if weight.dtype == torch.float64 else weight.float()
    groups = wide.t().unflatten(0, (-1, group_size))  # [G, group_size, N]
    if symmetric:
        high = groups.abs().amax(1, keepdim=True)
        low = -high
    else:
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scales = ((high - low) / top).to(dtype or weight.dtype)  # [G, 1, N]
    step = scales.to(wide.dtype)
    step = torch.where(
        step > 0, step, 1
    )  # a group of zeros, or one too small for the scale's dtype: all codes are zero's
    zeros = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / step).round().clamp(0, top)  # [G, 1, N]
    codes = ((groups / step).round() + zeros).clamp(0, top).flatten(0, 1)  # [K, N]
    packed_zeros = None if symmetric else pack(zeros.squeeze(1), dim=-1)
    return QuantizedWeight(pack(codes, dim=0), scales.squeeze(1).contiguous(), packed_zeros, bits, group_size)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The dense weight [N, K] in `dtype` (the scales' by default): the product of two exact numbers, rounded once."""
    wide = torch.promote_types(dtype or weight.dtype, torch.float32)
    codes = unpack(sequential(weight).packed, dim=0).unflatten(0, (-1, weight.group_size))  # [G, group_size, N]
    zeros = 2 ** (weight.bits - 1) if weight.zeros is None else unpack(weight.zeros, dim=-1).unsqueeze(1)  # [G, 1, N]
    dense = (codes - zeros).to(wide) * weight.scales.to(wide).unsqueeze(1)
    return dense.flatten(0, 1).t().to(dtype or weight.dtype)


@dataclass(frozen=True)
class QuantizedWeightArgument:
    """The rule for a QuantizedWeight: binds N, K, G, weight (its scales' dtype), bits, group_size, symmetric, order."""

    @cached_property
    def parts(self) -> dict[str, Tensor]:
        return {
            "packed": Tensor("K/8 N", "int32"),
            "scales": Tensor("G N", "weight"),
            "zeros": Tensor("G N/8", "int32"),
        }

    def bind(self, op: str, name: str, value: Any, axes: dict[str, Value], device: torch.device | None) -> None:
        if not isinstance(value, QuantizedWeight):
            raise ContractError(f"{op}: argument {name!r} must be a QuantizedWeight, got {type(value).__name__}")
        for part, rule in self.parts.items():
            if (tensor := getattr(value, part)) is not None:
                rule.bind(op, f"{name}.{part}", tensor, axes, device)
        axes["bits"], axes["group_size"], axes["symmetric"] = value.bits, value.group_size, value.symmetric
        axes["order"] = value.order


def needs_interleaved(axes: Axes) -> str | None:
    """Why a variant that reads interleaved words cannot take this weight, or None where it can.

    A weight that is yet to be loaded has no order: `prepare` sees to it.
    """
    if axes.get("order", "interleaved") == "interleaved":
        return None
    return f"its weight must be interleaved, not {axes['order']}: pass what tkernels.prepared(variant, weight) returns"
