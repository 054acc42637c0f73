"""From a Hugging Face directory to a model: the configuration first, then, kernels in hand, the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tkernels import KernelSet
from tmodel.architectures import Model, find_architecture
from tmodel.config import ConfigError, ModelConfig, end_token_ids, parse_config, read_json
from tmodel.formats import find_format
from tmodel.quantization import Quantization
from tmodel.weights import Checkpoint


def load_config(path: str | Path) -> ModelConfig:
    """The configuration in directory `path`; reads config.json, generation_config.json and, of a quantized
    model, quantize_config.json or quant_config.json; never the weights.

    Raises ConfigError, naming the file, where one is missing or damaged, the architecture is unknown (with those that
    are known), or a field asks for something that the model would not compute as it was trained.
    """
    file = Path(path) / "config.json"
    raw = read_json(file)
    try:
        names = raw.get("architectures")
        if not isinstance(names, list) or len(names) != 1:
            raise ConfigError(f"architectures must name exactly one architecture, got {names!r}")
        architecture = find_architecture(names[0])
        fields = parse_config(raw)
        config = architecture.resolve(fields, end_token_ids(Path(path), fields))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error.__cause__
    found = find_format(Path(path), raw)
    if found is None:
        return config
    where, quantization_format = found
    try:
        return replace(config, quantization=Quantization(quantization_format, tuple(architecture.linears(config))))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error.__cause__


def load_model(
    path: str | Path, config: ModelConfig, kernels: KernelSet, *, device: torch.device | str, dtype: torch.dtype
) -> Model:
    """The model in directory `path` as `dtype` on `device`, whatever float dtype it was saved as.

    Raises WeightError, naming file and tensor, where a tensor is missing, cut short, of another shape than `config`
    asks for, or not the model's. Only safetensors are read.
    """
    with Checkpoint(Path(path), device=device, dtype=dtype) as checkpoint, torch.inference_mode():
        # Checkpoints of 2023 and before carry these; every model computes them from config.json.
        checkpoint.ignore(name for name in checkpoint.names if name.endswith(".rotary_emb.inv_freq"))
        model = find_architecture(config.architecture).build(config, checkpoint, kernels)
        checkpoint.refuse_unused()
    return model
