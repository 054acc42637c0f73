"""Packs with AutoAWQ, version gemm; its own unpacking decodes. Options are those of its quant_config."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from decoded import calibration_tokens, pack_as_asked
from transformers import PreTrainedTokenizerFast


def pack(model: Path, checkpoint: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)  # newer names of its class are unknown there
    dense = AutoAWQForCausalLM.from_pretrained(str(model), device_map="cpu", safetensors=True)
    windows = calibration_tokens(dense.model.config.vocab_size)
    rows = [window["input_ids"][0].tolist() for window in windows]
    dense.quantize(tokenizer, quant_config=dict(options), calib_data=rows, max_calib_seq_len=64)
    dense.save_quantized(str(checkpoint))
    for file in model.glob("tokenizer*"):
        shutil.copy(file, checkpoint)
    return {
        name: dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.w_bit, layer.group_size).t()
        for name, layer in dense.model.named_modules()
        if hasattr(layer, "qweight")
    }


if __name__ == "__main__":
    pack_as_asked(pack)
