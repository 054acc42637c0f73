"""From a Hugging Face directory to a model: the configuration first, then, kernels in hand, the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tkernels import KernelSet
from tmodel.architectures import Architectures, find_architecture, known_architectures
from tmodel.config import Architecture, Model, ModelConfig
from tmodel.fields import HuggingFaceConfig, parse_fields
from tmodel.formats import find_format
from tmodel.json_files import ConfigError, read_json
from tmodel.quantization import Quantization
from tmodel.weights import Checkpoint


def load_config(path: str | Path, architectures: Architectures | None = None) -> ModelConfig:
    """The configuration in directory `path`; the weights are not read.

    Read are config.json, generation_config.json and, of a quantized model, quantize_config.json or quant_config.json.

    Args:
        path: a Hugging Face directory.
        architectures: those that may be meant; None is those of the house, see `architectures_with`.

    Raises:
        ConfigError: a file, which is named, is missing or damaged, the architecture is unknown (those that are known
            are listed), or a field asks for something that the model would not compute as it was trained.
    """
    file = Path(path) / "config.json"
    raw = read_json(file)
    try:
        architecture = architecture_of(raw, architectures)
        fields = parse_fields(architecture.fields, raw)
        config = architecture.resolve(fields, _end_token_ids(Path(path), fields))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error.__cause__
    found = find_format(Path(path), raw)
    if found is None:
        return config
    where, quantization_format = found
    try:
        return replace(config, quantization=Quantization(quantization_format, tuple(config.linears())))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error.__cause__


def config_of(raw: Mapping[str, Any], architectures: Architectures | None = None) -> ModelConfig:
    """What `load_config` will say of a directory with this config.json alone, of a dense model.

    Raises:
        ConfigError: as `load_config`.
    """
    architecture = architecture_of(raw, architectures)
    fields = parse_fields(architecture.fields, raw)
    return architecture.resolve(fields, _checked_token_ids(fields.eos_token_id, fields.vocab_size))


def architecture_of(raw: Mapping[str, Any], architectures: Architectures | None = None) -> Architecture:
    """The one that a config.json names."""
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ConfigError(f"architectures must name exactly one architecture, got {names!r}")
    return find_architecture(names[0], known_architectures() if architectures is None else architectures)


def load_model(
    path: str | Path, config: ModelConfig, kernels: KernelSet, *, device: torch.device | str, dtype: torch.dtype
) -> Model:
    """The model in directory `path` as `dtype` on `device`, whatever float dtype it was saved as.

    Raises:
        WeightError: a tensor, which is named with its file, is missing, cut short, of another shape than `config` asks
            for, or not the model's. Only safetensors are read.
    """
    with Checkpoint(Path(path), device=device, dtype=dtype) as checkpoint, torch.inference_mode():
        # Checkpoints of 2023 and before carry these; every model computes them from config.json.
        checkpoint.ignore(name for name in checkpoint.names if name.endswith(".rotary_emb.inv_freq"))
        model = config.architecture.build(config, checkpoint, kernels)
        checkpoint.refuse_unused()
    return model


def _end_token_ids(directory: Path, fields: HuggingFaceConfig) -> tuple[int, ...]:
    """The ids that end a generation: generation_config.json's where it names any, else config.json's.

    This is the order in which transformers' `generate` looks.
    """
    generation_file = directory / "generation_config.json"
    ids = read_json(generation_file).get("eos_token_id") if generation_file.exists() else None
    return _checked_token_ids(fields.eos_token_id if ids is None else ids, fields.vocab_size)


def _checked_token_ids(given: Any, vocab_size: int) -> tuple[int, ...]:
    """`given`, an id, a list of them or None, each once."""
    ids = [] if given is None else given if isinstance(given, list) else [given]
    for token_id in ids:
        if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise ConfigError(f"eos_token_id {token_id!r} is not a token id below vocab_size={vocab_size}")
    return tuple(dict.fromkeys(ids))
