"""ScaledWeight: a linear layer's weight as 8-bit codes with a scale for each output, as scaled_matmul reads it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tkernels.quantized.row_codes import LARGEST, codes_and_scales


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """W[n, k] = values[n, k] * scales[n], for N outputs and K inputs.

    Attributes:
        values: [N, K] int8 or float8_e4m3fn, unit stride in the last dim.
        scales: [N] float32.

    Raises:
        ValueError: parts whose shapes, dtypes or strides do not fit together.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dtype not in LARGEST:
            raise ValueError(f"ScaledWeight: values must be int8 or float8_e4m3fn, got {self.values.dtype}")
        if self.values.dim() != 2 or self.values.numel() == 0:
            raise ValueError(f"ScaledWeight: values must be [N, K], N and K at least 1, got {list(self.values.shape)}")
        if self.values.shape[1] > 1 and self.values.stride(1) != 1:
            raise ValueError(f"ScaledWeight: values need unit stride in the last dim, got {self.values.stride()}")
        if not self.scales.is_floating_point() or self.scales.element_size() < 4:
            raise ValueError(f"ScaledWeight: scales must be float32, got {self.scales.dtype}")
        if self.scales.shape != self.values.shape[:1]:
            shape = list(self.scales.shape)
            raise ValueError(f"ScaledWeight: scales has shape {shape}, not [{self.values.shape[0]}] = [N]")

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
        """Bytes of both parts."""
        return self.values.nbytes + self.scales.nbytes

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ScaledWeight":
        """The weight with `function` applied to each of its tensors."""
        return replace(self, values=function(self.values), scales=function(self.scales))

    def to(self, device: torch.device | str) -> "ScaledWeight":
        """The weight on another device."""
        return self.map_tensors(lambda tensor: tensor.to(device))


def quantize_rows(weight: torch.Tensor, dtype: torch.dtype) -> ScaledWeight:
    """Round-to-nearest quantization, each output by its own largest value, by the definition of quantize_tokens.

    Args:
        weight: [N, K], any float dtype, finite, N and K at least 1.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Raises:
        ValueError: another dtype, a shape that is not [N, K], or a value that is not finite.
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
    return (weight.values.to(wide) * weight.scales.to(wide).unsqueeze(-1)).to(dtype)
