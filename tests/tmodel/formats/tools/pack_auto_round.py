"""Packs with auto-round, rounding to nearest; its torch layers decode, in float16 as their scales are.

Its fp8 is decoded by the function with which it reads such models, in bfloat16. Options: `format` as quantize_and_save
takes it, the rest AutoRound's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round.utils.weight_handler import _dequant_fp8_linear_weight
from decoded import decode_by_identity, pack_as_asked
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def pack(model: Path, checkpoint: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    told = {"iters": 0, "disable_opt_rtn": True, **options}
    written_as = told.pop("format")
    tokenizer = AutoTokenizer.from_pretrained(model)
    AutoRound(AutoModelForCausalLM.from_pretrained(model), tokenizer, **told).quantize_and_save(
        output_dir=str(checkpoint), format=written_as
    )
    (folder,) = {file.parent for file in checkpoint.rglob("config.json")}
    if folder != checkpoint:  # newer versions make a folder of their own within it
        for file in list(folder.iterdir()):
            file.rename(checkpoint / file.name)
    stored = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
    blocked = [key.removesuffix(".weight_scale_inv") for key in stored if key.endswith(".weight_scale_inv")]
    if blocked:
        parts = {name: (stored[f"{name}.weight"], stored[f"{name}.weight_scale_inv"]) for name in blocked}
        return {name: _dequant_fp8_linear_weight(*its, [128, 128]) for name, its in parts.items()}
    packed = AutoModelForCausalLM.from_pretrained(checkpoint, device_map="cpu", dtype=torch.float16)
    dense = AutoModelForCausalLM.from_pretrained(model)
    decoded = {}
    for name in (key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")):
        layer, inputs = packed.get_submodule(name), dense.get_submodule(name).in_features
        if hasattr(layer, "qweight"):
            decoded[name] = decode_by_identity(layer, inputs, torch.float16)
        else:  # no layer of it reads AWQ's words on a CPU; its own unpacking does
            parts = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
            decoded[name] = dequantize_gemm(*parts, told["bits"], told["group_size"]).t()
    return decoded


if __name__ == "__main__":
    pack_as_asked(pack)
