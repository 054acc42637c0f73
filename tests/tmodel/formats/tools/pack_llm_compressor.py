"""Packs with llm-compressor; compressed-tensors decodes.

Options: `kv_cache_scheme`, where the cache is quantized too; the rest is a group of its config, `weights` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from decoded import calibration_tokens, pack_as_asked
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig


def pack(model: Path, checkpoint: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    dense = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    told = dict(options)
    cache = told.pop("kv_cache_scheme", None)
    groups = {"group_0": {"targets": ["Linear"], **told}}
    windows = [
        {name: tensor[0].tolist() for name, tensor in window.items()}
        for window in calibration_tokens(dense.config.vocab_size)
    ]
    oneshot(
        model=dense,
        recipe=QuantizationModifier(config_groups=groups, ignore=["lm_head"], kv_cache_scheme=cache),
        dataset=Dataset.from_list(windows), num_calibration_samples=len(windows), max_seq_length=64,
    )  # fmt: skip
    dense.save_pretrained(checkpoint, save_compressed=True)
    AutoTokenizer.from_pretrained(model).save_pretrained(checkpoint)
    plain = CompressedTensorsConfig(run_compressed=False)
    packed = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=plain, dtype="auto")
    linears = (name for name, layer in packed.named_modules() if isinstance(layer, torch.nn.Linear))
    return {name: packed.get_submodule(name).weight for name in linears if name != "lm_head"}


if __name__ == "__main__":
    pack_as_asked(pack)
