"""Two-layer Qwen3 checkpoints with quantized linears, each beside the dense model that they decode to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.tmodel.conftest import CONFIG, checkpoint_tensors
from tests.tmodel.formats.by_hand import Kind, as_torch, linear, settings
from tests.tmodel.mixtures import mixture_tensors

SHAPE = {
    **CONFIG,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "eos_token_id": None,
}
"""Linears of 128 and of 256 inputs: one group of 128 and two."""
LINEARS = ("_proj", ".w1", ".w2", ".w3")
"""How the names of linears end."""


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def write_models(
    directory: Path, kind_of: Kind | Callable[[str], Kind | None], quantization: Mapping[str, Any] | None = None,
    linears: tuple[str, ...] = LINEARS, **changes: Any,
) -> tuple[Path, Path]:  # fmt: skip
    """(a quantized model, its dense twin): `kind_of` a layer's name, None for a dense one; `quantization` is the config
    where it is not the kind's own, `linears` the ends of the names that are asked about. An expert's gate and up have
    one order of activations, as their inputs are the same.
    """
    config = {**SHAPE, **changes}
    dense = mixture_tensors(config) if "num_experts" in config else checkpoint_tensors(config)
    if config.get("attention_bias"):
        widths = {name: tensor.shape[0] for name, tensor in dense.items() if "self_attn" in name and tensor.dim() == 2}
        dense |= {name.replace("weight", "bias"): torch.linspace(-1, 1, width) for name, width in widths.items()}
    quantized = dict(dense)
    rng = np.random.default_rng(0)
    for name, tensor in dense.items():
        layer = name.removesuffix(".weight")
        kind = kind_of if isinstance(kind_of, Kind) else kind_of(layer)
        if not layer.endswith(linears) or not name.endswith(".weight") or kind is None:
            continue
        order = (
            np.random.default_rng(list(layer.replace("up_proj", "gate_proj").replace("w3", "w1").encode()))
            if "experts" in layer
            else None
        )
        parts, weight = linear(kind, *tensor.shape, rng, order)
        del quantized[name]
        quantized |= as_torch(parts, f"{layer}.")
        dense[name] = torch.from_numpy(weight).float()
    if quantization is None:
        assert isinstance(kind_of, Kind)
        quantization = settings(kind_of)
    return (
        write(directory / "quantized", {**config, "quantization_config": quantization}, quantized),
        write(directory / "dense", config, dense),
    )
