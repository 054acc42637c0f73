"""SqueezeLLM, dense and sparse: Kim et al., 2023, "SqueezeLLM".

    qweight          [K * bits / 32, N] int32   codes along K, a stream of bits
    lookup_table     [N, 2**bits]               W[n, k] = lookup_table[n, code] + S[n, k]
    rows, cols, vals [N + 1], [nnz], [nnz]      S by outputs, compressed rows; absent where there are no outliers
    full_rows        [K, t]                     outputs that are kept whole, each a column, added to S ...
    full_row_indices [t] int32                  ... and which outputs these are
    startrows                                   where threads of the original kernel begin: not used here

The code under an outlier names the table's entry nearest 0, and the outlier is stored less this entry. Where several
values share a place, S there is their sum rounded to the table's dtype, and W is rounded once more. The original writes
these tensors as a pickle, which `tk convert` turns into safetensors with the config
{"quant_method": "squeezellm", "wbits": 3 or 4}.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.weight import QuantizedWeight, unpack_codes
from tmodel.formats.base import (
    Scheme,
    check_bits,
    check_scheme,
    make_dense_layer_error,
    pack_by_parts,
    read_values,
    read_words,
)
from tmodel.formats.bitstream import num_words, pack_stream, unpack_stream
from tmodel.weights import Checkpoint

_INTEGERS = (torch.int32, torch.int64)


class SqueezeLLM(BaseModel):
    """The one setting that decides what is decoded.

    Attributes:
        wbits: Of a code; 3 or 4.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "squeezellm"

    wbits: int

    @field_validator("wbits", mode="before")
    @classmethod
    def _check_wbits(cls, wbits: Any) -> int:
        return check_bits(wbits, (3, 4))

    def scheme(self, layer: str) -> Scheme | None:
        return None if layer == "lm_head" else Scheme(self.wbits, coding="lookup", sparse=True)

    def check(self, layer: str, scheme: Any, outputs: int, inputs: int) -> None:
        scheme.check_inputs(layer, inputs)

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        bits = self.wbits
        rows = num_words(inputs, bits)
        words = read_words(checkpoint, f"{layer}.qweight", (rows, outputs), f"[K * {bits} / 32, N]")
        table = read_values(checkpoint, f"{layer}.lookup_table", (outputs, 2**bits), f"[N, 2**{bits}]")
        checkpoint.ignore([f"{layer}.startrows"])
        outliers = _read_outliers(checkpoint, layer, outputs, inputs, table.dtype)
        table = table.t().contiguous()  # [2**bits, N]
        if bits == 4:  # QuantizedWeight has the same words
            return QuantizedWeight(words, None, None, bits, -1, table=table, outliers=outliers)
        packed, high = pack_by_parts(lambda part: unpack_stream(words[:, part], 0, bits, inputs), outputs, bits)
        return QuantizedWeight(packed, None, None, bits, -1, high=high, table=table, outliers=outliers)

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        scheme = self.scheme(layer)
        if scheme is None:
            raise make_dense_layer_error(layer)
        check_scheme(weight, layer, scheme)
        assert weight.table is not None
        tensors = {
            "qweight": pack_stream(unpack_codes(weight), 0, self.wbits),
            "lookup_table": weight.table.t().contiguous(),
        }
        if weight.outliers is not None:
            tensors |= {name: getattr(weight.outliers, name) for name in ("rows", "cols", "vals")}
        return tensors

    def config(self) -> dict[str, Any]:
        return {"quant_method": self.method, "wbits": self.wbits}


def _read_outliers(
    checkpoint: Checkpoint, layer: str, outputs: int, inputs: int, dtype: torch.dtype
) -> Outliers | None:
    """S [N, K] from its compressed rows and its full rows; None where both are absent or empty."""
    parts = {}
    if f"{layer}.rows" in checkpoint or f"{layer}.vals" in checkpoint:
        parts["vals"] = _read_compressed_rows(checkpoint, layer, outputs, inputs)
    if f"{layer}.full_rows" in checkpoint or f"{layer}.full_row_indices" in checkpoint:
        parts["full_rows"] = _read_full_rows(checkpoint, layer, outputs, inputs)
    if not any(vals.numel() for _, _, vals in parts.values()):
        return None
    beyond = f"beyond the range of {str(dtype).removeprefix('torch.')}, the dtype of its lookup_table"
    for name, (_, _, vals) in parts.items():
        if not bool(torch.isfinite(vals.to(dtype)).all()):
            raise checkpoint.error(f"{layer}.{name}", f"has values {beyond}; it must hold them")
    rows, cols, vals = (torch.cat([part[i] for part in parts.values()]) for i in range(3))
    try:
        return outliers_from(rows, cols, vals.to(dtype), (outputs, inputs))
    except ValueError:  # indices and values were checked above, so a sum is out of range
        name = f"{layer}.{next(iter(parts))}"
        raise checkpoint.error(name, f"gives one place several values, in sum {beyond}; it must hold them") from None


def _read_compressed_rows(
    checkpoint: Checkpoint, layer: str, outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outputs, inputs, values), [nnz] each, of the compressed rows."""
    count = checkpoint.shape(f"{layer}.vals")[:1]
    rows = checkpoint.raw(f"{layer}.rows", (outputs + 1,), _INTEGERS, "where [N + 1] = {} is expected")
    cols = checkpoint.raw(f"{layer}.cols", count, _INTEGERS, "where as many as vals, {}, are expected")
    vals = read_values(checkpoint, f"{layer}.vals", count, "[nnz]")
    counts = rows.diff().long()
    if int(rows[0]) != 0 or int(rows[-1]) != vals.numel() or bool((counts < 0).any()):
        raise checkpoint.error(
            f"{layer}.rows",
            f"must rise from 0 to the {vals.numel()} of vals; it goes from {int(rows[0])} to {int(rows[-1])}",
        )
    _check_below(checkpoint, f"{layer}.cols", cols, inputs, "inputs")
    return torch.repeat_interleave(torch.arange(outputs, device=rows.device), counts), cols.long(), vals


def _read_full_rows(
    checkpoint: Checkpoint, layer: str, outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(outputs, inputs, values), [nnz] each, of the full rows' values that are not 0."""
    shape = checkpoint.shape(f"{layer}.full_row_indices")
    which = checkpoint.raw(f"{layer}.full_row_indices", shape[:1], _INTEGERS, "where [t] = {} is expected")
    values = read_values(checkpoint, f"{layer}.full_rows", (inputs, which.numel()), "[K, t]")
    _check_below(checkpoint, f"{layer}.full_row_indices", which, outputs, "outputs")
    cols, columns = values.nonzero(as_tuple=True)
    return which.long()[columns], cols, values[cols, columns]


def _check_below(checkpoint: Checkpoint, name: str, index: torch.Tensor, limit: int, what: str) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= limit):
        raise checkpoint.error(name, f"names {int(index.min())} to {int(index.max())}; there are {limit} {what}")
