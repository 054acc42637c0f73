"""Packs with GPTQModel; its torch kernels decode.

Options are QuantizeConfig's, and `calibration`: a file of safetensors with `windows` [n, S], and then nothing is
decoded; else tokens are random.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from decoded import calibration_tokens, decode_by_identity, pack_as_asked

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # on two cores it makes one, and then asks for two
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file


def pack(model: Path, checkpoint: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    told = dict(options)
    text = told.pop("calibration", None)
    dtype = torch.float16 if told.get("quant_method") == "awq" else torch.float32  # its AWQ layers take no other
    dense = GPTQModel.load(str(model), QuantizeConfig(**told), device="cpu", dtype=dtype)
    windows = calibration_tokens(dense.model.config.vocab_size)
    if text is not None:
        rows = load_file(text)["windows"]
        windows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]
    dense.quantize(windows, batch_size=1)
    dense.save(str(checkpoint))
    if text is not None:
        return {}  # what it is good for is measured, not how it is read
    packed = GPTQModel.load(str(checkpoint), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16).model
    return {
        name: decode_by_identity(layer, layer.in_features, torch.float16)
        for name, layer in packed.named_modules()
        if hasattr(layer, "qweight")
    }


if __name__ == "__main__":
    pack_as_asked(pack)
