"""Published shapes with random weights: a model of the real size, for measuring, that nobody has to download."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tmodel.config import ModelConfig
from tmodel.loading import parse_config

VERSION = 1  # goes up when other weights come out
_STD = 0.02  # transformers' initializer_range
PRESET_TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
"""Every preset's sizes. Data, so that their names are known where torch is not loaded."""

RANDOM_PRESETS: Mapping[str, Mapping[str, Any]] = PRESET_TABLE["random"]
"""The published config.json of <name> on the Hugging Face hub, as far as they decide what is computed; no end token."""


def random_config(preset: Mapping[str, Any]) -> ModelConfig:
    """What `load_config` will say of a directory that `write_random` made."""
    return parse_config(_config_json(preset))


def num_parameters(preset: Mapping[str, Any]) -> int:
    """Weights of a model of these sizes, a tied head's none."""
    return sum(math.prod(size) for size in random_config(preset).tensors().values())


def write_random(preset: Mapping[str, Any], directory: Path, seed: int) -> None:
    """config.json and bfloat16 weights into the empty `directory`.

    Matrices are drawn from a normal distribution, norms are ones, biases zeros; the same on every machine. A layer is a
    file, so that one of them is in memory at a time. There is no tokenizer and no end token.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = list(_shards(random_config(preset)))
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _drawn(name, shape, generator) for name, shape in shapes.items()}
        save_file(tensors, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    total = 2 * num_parameters(preset)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in (("config.json", _config_json(preset)), ("model.safetensors.index.json", index)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config_json(preset: Mapping[str, Any]) -> dict[str, Any]:
    return {"torch_dtype": "bfloat16", **preset}


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * _STD).to(torch.bfloat16)


def _shards(config: ModelConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """Name -> shape of what is around the layers, then of each layer."""
    shapes = dict(config.tensors())
    layers = [
        {name: shapes.pop(name) for name in list(shapes) if name.startswith(config.layer_prefix(index))}
        for index in range(config.num_layers)
    ]
    yield shapes
    yield from layers
