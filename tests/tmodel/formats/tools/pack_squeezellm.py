"""Packs with SqueezeLLM's own layer, out of a checkout of it, into the pickle that its pack.py writes.

Options: `checkout`, the path to it; `wbits`; `sparse`, the share of weights that are kept apart. Its kernels need CUDA
and its clustering gradients, so tables are quantiles here, and what is decoded is what its paper says of the tensors.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from decoded import pack_as_asked
from transformers import AutoModelForCausalLM, AutoTokenizer


def pack(model: Path, checkpoint: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    sys.modules["quant_cuda"] = ModuleType("quant_cuda")  # only its forward calls the kernels
    sys.path.insert(0, options["checkout"])
    from squeezellm.quant import QuantLinearLUT

    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state, decoded, counts = dict(dense.state_dict()), {}, {}
    for name, linear in dense.model.layers.named_modules(prefix="model.layers"):
        if not isinstance(linear, torch.nn.Linear):
            continue
        weight = linear.weight.data
        table, codes, outliers = _cluster(weight, options["wbits"], options["sparse"])
        layer = QuantLinearLUT(options["wbits"], weight.shape[1], weight.shape[0], False, bool(options["sparse"]))
        lut = [[(table[row].numpy(), codes[row].numpy())] for row in range(len(table))]
        layer.pack2(linear, (lut, outliers.to_sparse()), bool(options["sparse"]))
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
        if options["sparse"]:
            counts[f"sparse_threshold.{name}"] = layer.vals.shape[-1]
        decoded[name] = _decode(layer, table, codes)
    checkpoint.mkdir()
    torch.save({**state, **counts}, checkpoint / "packed.pt")
    (checkpoint / "quant_config.json").write_text(json.dumps({"wbits": options["wbits"]}))
    dense.config.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(model).save_pretrained(checkpoint)
    return decoded


def _cluster(weight: torch.Tensor, bits: int, sparse: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tables [N, 2**bits], the nearest entry of each weight [N, K], the weights kept apart [N, K], 0 elsewhere)."""
    ends = torch.linspace(0, 1, 2**bits + 2)[1:-1]
    table = torch.quantile(weight, ends, dim=1).t().contiguous()  # [N, 2**bits]
    bound = torch.quantile(weight.abs(), 1 - sparse) if sparse else torch.tensor(float("inf"))
    apart = weight.abs() > bound
    kept = torch.where(apart, 0, weight)
    codes = (kept[:, :, None] - table[:, None, :]).abs().argmin(-1)
    return table, codes, torch.where(apart, weight, 0)


def _decode(layer: torch.nn.Module, table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """[N, K] float32: table entries plus the sparse part as the layer holds it, each sum rounded once."""
    weight = table.gather(1, codes)
    if hasattr(layer, "vals"):
        rows = np.repeat(np.arange(len(table)), np.diff(layer.rows.numpy()))
        weight[torch.from_numpy(rows), layer.cols.long()] += layer.vals
    return weight


if __name__ == "__main__":
    pack_as_asked(pack)
