"""SqueezeLLM, dense and sparse: Kim et al., 2023, "SqueezeLLM".

    qweight          [K * bits / 32, N] int32   codes along K, a stream of bits
    lookup_table     [N, 2**bits]               W[n, k] = lookup_table[n, code] + S[n, k]
    rows, cols, vals [N + 1], [nnz], [nnz]      S by outputs, compressed rows; absent where nothing is kept apart
    full_rows        [K, t]                     outputs that are kept whole, each a column, added to S ...
    full_row_indices [t] int32                  ... and which ones they are
    startrows                                   where threads of the original kernel begin: of no use here

Codes under a value kept apart stand for the entry next to 0, and the value is that much less: nothing is left out.
Where several values are at one place, S there is their sum rounded to the table's dtype, and W is rounded once more.
The tensors are those of the original's pickle, which `tk convert` writes as safetensors; its config is
{"quant_method": "squeezellm", "wbits": 3 or 4}.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, field_validator

from tkernels.quantized.outliers import Outliers, outliers_from
from tkernels.quantized.weight import QuantizedWeight, unpack_codes
from tmodel.formats.base import Scheme, check_bits, dense_layer, packed_by_parts, read_values, read_words, require
from tmodel.formats.bitstream import num_words, pack_stream, unpack_stream
from tmodel.weights import Checkpoint

_INTEGERS = (torch.int32, torch.int64)


class SqueezeLLM(BaseModel):
    """The one setting that decides what is decoded."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)
    method: ClassVar[str] = "squeezellm"

    wbits: int

    @field_validator("wbits", mode="before")
    @classmethod
    def _wbits(cls, wbits: Any) -> int:
        return check_bits(wbits, (3, 4))

    def scheme(self, layer: str) -> Scheme | None:
        return None if layer == "lm_head" else Scheme(self.wbits, coding="lookup", sparse=True)

    def check(self, layer: str, outputs: int, inputs: int) -> None:
        scheme = self.scheme(layer)
        if scheme is not None:
            scheme.check_inputs(layer, inputs)

    def read(self, checkpoint: Checkpoint, layer: str, outputs: int, inputs: int) -> QuantizedWeight:
        bits = self.wbits
        rows = num_words(inputs, bits)
        words = read_words(checkpoint, f"{layer}.qweight", (rows, outputs), f"[K * {bits} / 32, N]")
        table = read_values(checkpoint, f"{layer}.lookup_table", (outputs, 2**bits), f"[N, 2**{bits}]")
        checkpoint.ignore([f"{layer}.startrows"])
        outliers = _outliers(checkpoint, layer, outputs, inputs, table.dtype)
        table = table.t().contiguous()  # [2**bits, N]
        if bits == 4:  # the words are those of QuantizedWeight already
            return QuantizedWeight(words, None, None, bits, -1, table=table, outliers=outliers)
        packed, high = packed_by_parts(lambda part: unpack_stream(words[:, part], 0, bits, inputs), outputs, bits)
        return QuantizedWeight(packed, None, None, bits, -1, high=high, table=table, outliers=outliers)

    def encode(self, layer: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
        scheme = self.scheme(layer)
        if scheme is None:
            raise dense_layer(layer)
        require(weight, layer, scheme)
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


def _outliers(checkpoint: Checkpoint, layer: str, outputs: int, inputs: int, dtype: torch.dtype) -> Outliers | None:
    """S [N, K] from its compressed rows and its full ones; None where the layer has neither."""
    parts = {}
    if f"{layer}.rows" in checkpoint or f"{layer}.vals" in checkpoint:
        parts["vals"] = _compressed(checkpoint, layer, outputs, inputs)
    if f"{layer}.full_rows" in checkpoint or f"{layer}.full_row_indices" in checkpoint:
        parts["full_rows"] = _full(checkpoint, layer, outputs, inputs)
    if not any(vals.numel() for _, _, vals in parts.values()):
        return None
    beyond = f"beyond the range of {str(dtype).removeprefix('torch.')}, the dtype of its lookup_table"
    for name, (_, _, vals) in parts.items():
        if not bool(torch.isfinite(vals.to(dtype)).all()):
            raise checkpoint.error(f"{layer}.{name}", f"has values {beyond}; it must hold them")
    rows, cols, vals = (torch.cat([part[i] for part in parts.values()]) for i in range(3))
    try:
        return outliers_from(rows, cols, vals.to(dtype), (outputs, inputs))
    except ValueError:  # indices and values were looked at: it is a sum
        name = f"{layer}.{next(iter(parts))}"
        raise checkpoint.error(name, f"gives one place several values, in sum {beyond}; it must hold them") from None


def _compressed(
    checkpoint: Checkpoint, layer: str, outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, input, value) [nnz] each."""
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


def _full(
    checkpoint: Checkpoint, layer: str, outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, input, value) of every value of the full rows that is not 0."""
    shape = checkpoint.shape(f"{layer}.full_row_indices")
    which = checkpoint.raw(f"{layer}.full_row_indices", shape[:1], _INTEGERS, "where [t] = {} is expected")
    values = read_values(checkpoint, f"{layer}.full_rows", (inputs, which.numel()), "[K, t]")
    _check_below(checkpoint, f"{layer}.full_row_indices", which, outputs, "outputs")
    cols, columns = values.nonzero(as_tuple=True)
    return which.long()[columns], cols, values[cols, columns]


def _check_below(checkpoint: Checkpoint, name: str, index: torch.Tensor, limit: int, what: str) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= limit):
        raise checkpoint.error(name, f"names {int(index.min())} to {int(index.max())}; there are {limit} {what}")
