"""ScaledWeight: a linear layer's weight as 8-bit codes with scales, for products with inputs of 8-bit codes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tkernels.quantized.row_codes import BLOCK, LARGEST, codes_and_scales


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """A weight of N outputs and K inputs, whose inputs become 8-bit codes too:

        W[n, k] = values[n, k] * scales[n]                        a scale for each output
        W[n, k] = values[n, k] * scales[n // 128, k // 128]       for each block

    Attributes:
        values: [N, K] int8 or float8_e4m3fn, unit stride in the last dim.
        scales: [N] float32; or [ceil(N / 128), K / 128] of float8_e4m3fn values.
        input_scale: [1] float32, what the inputs' codes are multiplied by where that was fixed beforehand; None where
            each token, or each 128 inputs of it, finds its own.

    Raises:
        ValueError: Parts whose shapes, dtypes or strides do not fit together.
    """

    values: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dtype not in LARGEST:
            raise ValueError(f"ScaledWeight: values must be int8 or float8_e4m3fn, got {self.values.dtype}")
        if self.values.dim() != 2 or self.values.numel() == 0:
            raise ValueError(f"ScaledWeight: values must be [N, K], N and K at least 1, got {list(self.values.shape)}")
        if self.values.shape[1] > 1 and self.values.stride(1) != 1:
            raise ValueError(f"ScaledWeight: values need unit stride in the last dim, got {self.values.stride()}")
        if not self.scales.is_floating_point() or self.scales.element_size() < 4:
            raise ValueError(f"ScaledWeight: scales must be float32, got {self.scales.dtype}")
        self._check_scales()
        if self.input_scale is not None and (self.is_blocked or self.input_scale.shape != (1,)):
            shape = list(self.input_scale.shape)
            raise ValueError(f"ScaledWeight: input_scale must be [1], and of no blocks, got {shape}")

    def _check_scales(self) -> None:
        (outputs, inputs), shape = self.values.shape, list(self.scales.shape)
        if not self.is_blocked:
            if shape != [outputs]:
                raise ValueError(f"ScaledWeight: scales has shape {shape}, not [{outputs}] = [N]")
        elif self.dtype != torch.float8_e4m3fn or inputs % BLOCK or shape != [-(-outputs // BLOCK), inputs // BLOCK]:
            raise ValueError(
                f"ScaledWeight: scales has shape {shape}; blocks are of float8_e4m3fn values, K a multiple of {BLOCK}, "
                f"and have [ceil(N / {BLOCK}), K / {BLOCK}] scales; values are {self.dtype} {[outputs, inputs]}"
            )

    @property
    def is_blocked(self) -> bool:
        """Whether a scale is a block's, not an output's."""
        return self.scales.dim() == 2

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as the dense weight's."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The codes' dtype, which the tokens' codes must have too."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.input_scale is None else self.input_scale.nbytes)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ScaledWeight":
        """The weight with `function` applied to each of its tensors."""
        input_scale = None if self.input_scale is None else function(self.input_scale)
        return replace(self, values=function(self.values), scales=function(self.scales), input_scale=input_scale)

    def to(self, device: torch.device | str) -> "ScaledWeight":
        """The weight on another device."""
        return self.map_tensors(lambda tensor: tensor.to(device))


def quantize_rows(weight: torch.Tensor, dtype: torch.dtype) -> ScaledWeight:
    """Round-to-nearest quantization, each output by its own largest value, by the definition of quantize_tokens.

    Args:
        weight: [N, K], any float dtype, finite, N and K at least 1.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Raises:
        ValueError: Another dtype, a shape that is not [N, K], or a value that is not finite.
    """
    if dtype not in LARGEST:
        raise ValueError(f"quantize_rows: dtype must be torch.int8 or torch.float8_e4m3fn, got {dtype}")
    if weight.dim() != 2 or not weight.is_floating_point() or weight.numel() == 0:
        raise ValueError(f"quantize_rows: weight must be floating [N, K], got {weight.dtype} {list(weight.shape)}")
    wide = weight.float()
    largest = wide.abs().amax(dim=-1)  # [N]
    if not torch.isfinite(largest).all():
        row = int((~torch.isfinite(largest)).nonzero()[0])
        raise ValueError(f"quantize_rows: weight's row {row} has a value that is not finite")
    return ScaledWeight(*codes_and_scales(wide, largest, dtype))


def dequantize(weight: ScaledWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The dense weight [N, K] in `dtype`: the product of two exact numbers in fp32, or in float64, then rounded."""
    wide = torch.promote_types(dtype, torch.float32)
    values, scales = weight.values.to(wide), weight.scales.to(wide)
    if weight.is_blocked:
        return (values * spread_blocks(scales, weight.shape[0])).to(dtype)
    return (values * scales.unsqueeze(-1)).to(dtype)


def spread_blocks(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    """Block scales [ceil(N / 128), K / 128] -> [N, K], each at every place of its block."""
    return scales.repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK, 1)


def incompatible_reason(one: ScaledWeight, other: ScaledWeight) -> str | None:
    """What keeps `other`, of the same inputs, from following `one` in one weight; None where nothing does."""
    for name in ("dtype", "is_blocked"):
        if getattr(one, name) != getattr(other, name):
            return f"{name} {getattr(one, name)} and {getattr(other, name)}"
    if one.shape[1] != other.shape[1]:
        return f"inputs {one.shape[1]} and {other.shape[1]}"
    if one.is_blocked and one.shape[0] % BLOCK:
        return f"its {one.shape[0]} outputs end within a block of {BLOCK}"
    mine, theirs = one.input_scale, other.input_scale
    if mine is None or theirs is None:
        return None if mine is theirs else "only one has a scale of its inputs"
    return None if torch.equal(mine, theirs) else "each has its own scale of the inputs"


def concatenate(weights: Sequence[ScaledWeight]) -> ScaledWeight:
    """One weight with the outputs of all, in order, bit for bit.

    Raises:
        ValueError: Two of them cannot be one weight; see `incompatible_reason`.
    """
    for one, other in itertools.pairwise(weights):
        if reason := incompatible_reason(one, other):
            raise ValueError(f"scaled weights cannot be one: {reason}")
    if len(weights) == 1:
        return weights[0]
    values = torch.cat([weight.values.view(torch.uint8) for weight in weights]).view(weights[0].dtype)
    return replace(weights[0], values=values, scales=torch.cat([weight.scales for weight in weights]))
