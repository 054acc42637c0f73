"""Packs with AutoAWQ, version gemm; its own unpacking decodes. Options are those of its quant_config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from decoded import calibration_tokens, pack_as_asked
from transformers import AutoTokenizer


def pack(model: Path, checkpoint: Path, options: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    dense = AutoAWQForCausalLM.from_pretrained(str(model), device_map="cpu", safetensors=True)
    windows = calibration_tokens(dense.model.config.vocab_size)
    texts = [tokenizer.decode(window["input_ids"][0]) for window in windows]
    dense.quantize(tokenizer, quant_config=dict(options), calib_data=texts, max_calib_seq_len=64)
    dense.save_quantized(str(checkpoint))
    tokenizer.save_pretrained(checkpoint)
    return {
        name: dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.w_bit, layer.group_size).t()
        for name, layer in dense.model.named_modules()
        if hasattr(layer, "qweight")
    }


if __name__ == "__main__":
    pack_as_asked(pack)
