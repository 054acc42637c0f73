"""Packs with auto-round, rounding to nearest; its torch layers decode, in float16 as their scales are.

Options: `format` as quantize_and_save takes it, the rest AutoRound's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from decoded import decode_by_identity, pack_as_asked
from safetensors import safe_open
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
    packed = AutoModelForCausalLM.from_pretrained(checkpoint, device_map="cpu", dtype=torch.float16)
    dense = AutoModelForCausalLM.from_pretrained(model)
    decoded = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            names = [key.removesuffix(".qweight") for key in stored.keys() if key.endswith(".qweight")]  # noqa: SIM118
        for name in names:
            layer, inputs = packed.get_submodule(name), dense.get_submodule(name).in_features
            # Some of its layers hold codes, and others what these decode to.
            has_codes = hasattr(layer, "qweight")
            decoded[name] = decode_by_identity(layer, inputs, torch.float16) if has_codes else layer.weight
    return decoded


if __name__ == "__main__":
    pack_as_asked(pack)
