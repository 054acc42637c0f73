"""Outliers: the few weights that a quantized matrix keeps beside its codes, in compressed rows."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Outliers:
    """S [N, K], sparse, by outputs: S[n, cols[i]] = vals[i] for rows[n] <= i < rows[n + 1].

    Attributes:
        rows: [N + 1] int32, from 0 to nnz, never falling.
        cols: [nnz] int32, inputs, rising within a row.
        vals: [nnz] floating.

    All are contiguous. Dense-and-sparse decomposition: Kim et al., 2023, "SqueezeLLM".

    Raises ValueError where dtypes or shapes do not fit. The values are for `outliers_from` to get right: reading them
    at every copy would wait for the device.
    """

    rows: torch.Tensor
    cols: torch.Tensor
    vals: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            part = getattr(self, name)
            if part.dtype is not torch.int32 or part.dim() != 1 or not part.is_contiguous():
                raise ValueError(
                    f"Outliers: {name} must be contiguous int32 of one dim, got {part.dtype} {[*part.shape]}"
                )
        if not self.vals.is_floating_point() or self.vals.shape != self.cols.shape or not self.vals.is_contiguous():
            raise ValueError(
                f"Outliers: vals must be contiguous and floating, one for each of {self.cols.numel()} cols, got "
                f"{self.vals.dtype} {[*self.vals.shape]}"
            )
        if self.rows.numel() < 2:
            raise ValueError(f"Outliers: rows must have N + 1 entries, got {self.rows.numel()}")
        if self.cols.numel() >= 2**30:
            raise ValueError(f"Outliers: the kernels' 32-bit offsets reach 2**30 of them, not {self.cols.numel()}")

    @property
    def num_outputs(self) -> int:
        return self.rows.numel() - 1

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Outliers":
        return Outliers(function(self.rows), function(self.cols), function(self.vals))

    def outputs(self) -> torch.Tensor:
        """[nnz] int64, the output that each value belongs to."""
        counts = self.rows.diff().long()
        return torch.repeat_interleave(torch.arange(self.num_outputs, device=self.rows.device), counts)


def outliers_from(outputs: torch.Tensor, inputs: torch.Tensor, vals: torch.Tensor, shape: tuple[int, int]) -> Outliers:
    """Outliers of an [N, K] = `shape` weight from values at (outputs[i], inputs[i]), [n] each, in any order; those at
    one place are added up in float64, and the sum rounded to the dtype of `vals`.

    Raises ValueError for an index out of range or a value, or sum, that is not finite.
    """
    num_outputs, num_inputs = shape
    for name, index, limit in (("output", outputs, num_outputs), ("input", inputs, num_inputs)):
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= limit):
            raise ValueError(f"Outliers: {name} {int(index.min())} or {int(index.max())} is not below {limit}")
    if not bool(torch.isfinite(vals).all()):
        raise ValueError("Outliers: a value is not finite")
    places, where = torch.unique(outputs.long() * num_inputs + inputs.long(), return_inverse=True)  # sorted
    summed = torch.zeros(places.numel(), dtype=torch.float64, device=vals.device)
    summed = summed.index_add_(0, where, vals.double()).to(vals.dtype)
    if not bool(torch.isfinite(summed).all()):
        raise ValueError(f"Outliers: the values at one place add up beyond the range of {vals.dtype}")
    rows = torch.zeros(num_outputs + 1, dtype=torch.int64, device=vals.device)
    rows[1:] = torch.bincount(places // num_inputs, minlength=num_outputs).cumsum(0)
    return Outliers(rows.int(), (places % num_inputs).int(), summed.contiguous())
