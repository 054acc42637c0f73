"""What a tool itself decodes of the checkpoint that it wrote. Runs in the tool's environment: torch alone is there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CHECKPOINT, DECODED = "checkpoint", "decoded.safetensors"


def pack_as_asked(pack: Callable[[Path, Path, Mapping[str, Any]], Mapping[str, torch.Tensor]]) -> None:
    """Runs `pack(model, checkpoint, options)` on this process's arguments, and saves the weights that it returns.

    Args:
        pack: Writes a checkpoint of the dense model, and returns layer -> its weight [N, K] as the tool decodes it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="dense, with a tokenizer")
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("options", type=json.loads, help="of the kind, as JSON")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True)
    torch.manual_seed(0)
    decoded = pack(asked.model, asked.out / CHECKPOINT, asked.options)
    save_file({name: weight.detach().contiguous() for name, weight in decoded.items()}, asked.out / DECODED)


def decode_by_identity(layer: torch.nn.Module, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]: what a layer without bias makes of each input alone; a sum of one weight and zeros is exact."""
    with torch.inference_mode():
        out: torch.Tensor = layer(torch.eye(inputs, dtype=dtype))  # [K, N]
    return out.t()


def calibration_tokens(vocab_size: int, count: int = 64, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Windows of random tokens, as the tools take them: what codes are chosen does not matter here."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocab_size, (count, length), generator=generator)
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]
