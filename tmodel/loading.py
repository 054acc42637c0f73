"""Loads a model from a Hugging Face directory: first the configuration, then, once kernels are chosen, the weights."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tkernels import KernelSet
from tmodel.architectures import Architectures, find_architecture, known_architectures
from tmodel.cache_kinds import store_pages_as
from tmodel.config import Architecture, Model, ModelConfig
from tmodel.fields import parse_fields
from tmodel.formats import find_format, refuse_gguf
from tmodel.formats.cache_scheme import parse_cache_dtype
from tmodel.json_files import ConfigError, read_json
from tmodel.quantization import Quantization
from tmodel.weights import Checkpoint

_MAX_NAME = 200
"""Characters of an architecture's name that a message still shows."""


def load_config(path: str | Path, architectures: Architectures | None = None) -> ModelConfig:
    """Loads the configuration in directory `path`, and no weights.

    The files are config.json, generation_config.json and, for some quantized models, quantize_config.json or
    quant_config.json.

    Args:
        path: A Hugging Face directory.
        architectures: Those that config.json may name; None is the built-in ones, see `architectures_with`.

    Raises:
        ConfigError: A file is missing or damaged, the architecture is unknown, or a field asks for something that the
            model would not compute as it was trained. The message names the file, and the known architectures.
    """
    refuse_gguf(Path(path))
    file = Path(path) / "config.json"
    raw = read_json(file)
    with _naming(file):
        architecture = find_named_architecture(raw, architectures)
        fields = parse_fields(architecture.fields, raw)
    ids = _generation_token_ids(Path(path) / "generation_config.json", fields.vocab_size)
    with _naming(file):
        if ids is None:
            ids = _parse_token_ids(fields.eos_token_id, fields.vocab_size)
        config = architecture.resolve(fields, ids)
    named_format = find_format(Path(path), raw)
    if named_format is None:
        return config
    format_file, quantization_format = named_format
    with _naming(format_file):
        cache_dtype = parse_cache_dtype(raw.get("quantization_config"))
        quantization = Quantization(quantization_format, tuple(config.linears()), cache_dtype)
        cache_kinds = store_pages_as(config.cache_kinds, cache_dtype)
        return replace(config, quantization=quantization, cache_kinds=cache_kinds)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Puts the file ahead of what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error.__cause__


def parse_config(raw: Mapping[str, Any], architectures: Architectures | None = None) -> ModelConfig:
    """Parses the config.json of a dense model: the result of `load_config` for a directory with this file alone.

    Args:
        raw: config.json.
        architectures: As for `load_config`.

    Raises:
        ConfigError: As `load_config`.
    """
    architecture = find_named_architecture(raw, architectures)
    fields = parse_fields(architecture.fields, raw)
    return architecture.resolve(fields, _parse_token_ids(fields.eos_token_id, fields.vocab_size))


def find_named_architecture(raw: Mapping[str, Any], architectures: Architectures | None = None) -> Architecture:
    """Finds the architecture that a config.json names.

    Args:
        raw: config.json.
        architectures: As for `load_config`.

    Raises:
        ConfigError: It names none, several or an unknown one.
    """
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or len(str(names[0])) > _MAX_NAME:
        raise ConfigError(f"architectures must name exactly one architecture, got {reprlib.repr(names)}")
    return find_architecture(names[0], known_architectures() if architectures is None else architectures)


def load_model(
    path: str | Path, config: ModelConfig, kernels: KernelSet, *, device: torch.device | str, dtype: torch.dtype
) -> Model:
    """Loads the model in directory `path`. Only safetensors are read.

    Args:
        path: A Hugging Face directory.
        config: Its configuration, see `load_config`.
        kernels: That the model calls.
        device: Where weights go.
        dtype: Of the model, whatever float dtype its file has.

    Raises:
        WeightError: A tensor is missing, cut short, of another shape than `config` asks for, or not the model's. The
            message names file and tensor.
    """
    opened = Checkpoint(Path(path), device=device, dtype=dtype, prefix=config.base_prefix)
    with opened as checkpoint, torch.inference_mode():
        # Checkpoints of 2023 and before carry this table; every model computes it from config.json.
        checkpoint.ignore(name for name in checkpoint.names if name.endswith(".rotary_emb.inv_freq"))
        # A layer that is not there is found before any is read.
        checkpoint.check_headers(_layer_tensors(config, checkpoint.coded_layers))
        model = config.architecture.build(config, checkpoint, kernels)
        checkpoint.refuse_unused()
    return model


def _layer_tensors(config: ModelConfig, coded: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a checkpoint must hold of the layers; what replaces a quantized weight is not among it, be
    the layer quantized by the config or one of those `coded` in the file.
    """
    quantization, layers = config.quantization, f"{config.architecture.layers}."

    def is_dense(layer: str) -> bool:
        return quantization is None or (quantization.scheme(layer) is None and layer not in coded)

    return {
        name: shape
        for name, shape in config.tensors().items()
        if name.startswith(layers) and is_dense(name.removesuffix(".weight"))
    }


def _generation_token_ids(file: Path, vocab_size: int) -> tuple[int, ...] | None:
    """Reads the ids that end a generation from generation_config.json; None where it is not there, or names none.

    They stand above config.json's. transformers' `generate` looks in the same order.
    """
    ids = read_json(file).get("eos_token_id") if file.exists() else None
    with _naming(file):
        return None if ids is None else _parse_token_ids(ids, vocab_size)


def _parse_token_ids(given: Any, vocab_size: int) -> tuple[int, ...]:
    """Checks `given`, an id, a list of ids or None, and drops duplicates."""
    ids = [] if given is None else given if isinstance(given, list) else [given]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:  # JSON's true is no number
            raise ConfigError(f"eos_token_id {reprlib.repr(token_id)} is not a token id below vocab_size={vocab_size}")
    return tuple(dict.fromkeys(ids))
