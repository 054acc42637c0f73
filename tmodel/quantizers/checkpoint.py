"""Quantizes a dense checkpoint, one layer at a time: `tk quantize` once the calibration tokens are there."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tmodel.architectures import Architectures
from tmodel.config import ModelConfig
from tmodel.formats.base import QuantizationFormat
from tmodel.json_files import ConfigError, read_json
from tmodel.loading import load_config
from tmodel.quantization import LinearShape, Quantization
from tmodel.quantizers.calibration import choose_windows, forward, head_gradient
from tmodel.quantizers.layers import (
    TransformersLayers,
    layer_groups,
    layer_tensors,
    linear_names,
    outer_tensors,
    transposed_matrices,
)
from tmodel.quantizers.method import Layer, Method, QuantizedLayer
from tmodel.quantizers.unfinished import QuantizerError, Unfinished, open_unfinished
from tmodel.weights import Checkpoint

Progress = Callable[[str], None]
"""Called after each of `num_steps` with the name of the step."""

_COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_CONFIGS_OF_OTHERS = ("quantize_config.json", "quant_config.json")


@dataclass(frozen=True)
class Job:
    """A checkpoint to quantize, and how.

    Attributes:
        source: The dense model's directory.
        config: Its configuration.
        method: How codes are chosen.
        bits: Of a code.
        group_size: Inputs that share a scale; -1 is all.
        windows: [n, S + 1] int64 tokens, see calibration.choose_windows; None where the method's walk is "none".
    """

    source: Path
    config: ModelConfig
    method: Method
    bits: int
    group_size: int
    windows: torch.Tensor | None = None

    @property
    def num_steps(self) -> int:
        """What a progress bar counts to: one for each layer, two where a forward walk precedes the backward one."""
        return self.config.num_layers * (2 if self.method.walk == "backward" else 1)

    @property
    def format(self) -> QuantizationFormat:
        """The format of the quantized checkpoint."""
        return self.method.format(self.bits, self.group_size)

    def options(self) -> dict[str, Any]:
        """What must be equal in a later run that goes on with this one's layers."""
        files = sorted(self.source.glob("*.safetensors"))
        windows = None if self.windows is None else hashlib.sha256(self.windows.numpy().tobytes()).hexdigest()
        return {
            "model": str(self.source.resolve()),
            "its files": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files],
            "method": self.method.name,
            **self.method.options.model_dump(),
            "bits": self.bits,
            "group_size": self.group_size,
            "tokens of a calibration window": None if self.windows is None else self.windows.shape[1] - 1,
            "sha256 of the calibration windows": windows,
        }


def plan_job(
    source: Path, method: Method, bits: int, group_size: int, architectures: Architectures | None = None
) -> Job:
    """Makes a job without its windows. Reads configurations alone.

    Args:
        source: The dense model's directory.
        method: How codes are chosen.
        bits: Of a code.
        group_size: Inputs that share a scale; -1 is all.
        architectures: Those that the model may be of; None is the built-in ones.

    Raises:
        QuantizerError: The model is quantized already, the method does not write such bits, or a linear's size does not
            fit the bits or the group size.
        ConfigError: The model cannot be served.
    """
    raw = read_json(source / "config.json")
    reasons = ["config.json has a quantization_config"] if raw.get("quantization_config") is not None else []
    reasons += [f"it has a {name}" for name in _CONFIGS_OF_OTHERS if (source / name).exists()]
    if reasons:
        raise QuantizerError(f"{source} is quantized already: {reasons[0]}; a dense model is needed")
    config = load_config(source, architectures)
    check_settings(config, method, bits, group_size)
    return Job(source, config, method, bits, group_size)


def check_settings(config: ModelConfig, method: Method, bits: int, group_size: int) -> None:
    """Checks that a method can quantize every linear layer of a model.

    Args:
        config: Of the model.
        method: How codes are chosen.
        bits: Of a code.
        group_size: Inputs that share a scale; -1 is all.

    Raises:
        QuantizerError: The method does not write such bits or groups, the architecture names no linears, or a linear's
            size does not fit the bits or the group size.
    """
    if bits not in method.bits:
        supported = " and ".join(map(str, method.bits))
        raise QuantizerError(f"{method.name} writes {supported} bits, not {bits}")
    if not method.grouped and group_size != -1:
        raise QuantizerError(f"{method.name} has no groups: group size must be -1, got {group_size}")
    if method.walk != "none" and any(shape.num_experts for shape in config.linears()):
        raise QuantizerError(
            f"{config.architecture.name} has experts, whose inputs {method.name} would have to see, which is not "
            "supported; rtn needs none"
        )
    if not _quantized_linears(config):
        raise QuantizerError(f"{config.architecture.name} names no linear layers that could be quantized")
    try:
        Quantization(method.format(bits, group_size), tuple(_quantized_linears(config)))
    except ValidationError as error:
        why = "; ".join(one["msg"].removeprefix("Value error, ") for one in error.errors())
        raise QuantizerError(f"{method.name} with {bits} bits, group size {group_size}: {why}") from None
    except ConfigError as error:
        raise QuantizerError(f"{method.name} with {bits} bits, group size {group_size}: {error}") from None


def _quantized_linears(config: ModelConfig) -> list[LinearShape]:
    """The linears of all layers; the head stays dense."""
    return [shape for shape in config.linears() if shape.names[0].startswith(f"{config.architecture.layers}.")]


def choose_calibration_windows(config: ModelConfig, tokens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Chooses the calibration windows for a model.

    A second moment of K inputs has an inverse only with K tokens or more, so the text must have as many.

    Args:
        config: Of the model.
        tokens: [T] int64, the calibration text.
        num_tokens: S, inputs of a window.

    Returns:
        [n, S + 1] int64, see calibration.choose_windows.

    Raises:
        QuantizerError: The text is too short, or a window is longer than the model's context.
    """
    if not 1 <= num_tokens <= config.max_position_embeddings:
        raise QuantizerError(f"windows of {num_tokens} tokens; the model was made for {config.max_position_embeddings}")
    least = max(num_tokens + 1, *(shape.inputs for shape in _quantized_linears(config)))
    if len(tokens) < least:
        raise QuantizerError(f"{len(tokens)} tokens of calibration text are too few; it takes {least} or more")
    return choose_windows(tokens, num_tokens)


def quantize_checkpoint(job: Job, out: Path, progress: Progress) -> None:
    """Writes a quantized checkpoint, which appears whole or not at all.

    A run that was stopped keeps its finished layers, and the next run goes on with them.

    Args:
        job: What to quantize, and how.
        out: The new directory.
        progress: Called after each step.

    Raises:
        FileExistsError: `out` exists and is not empty.
        QuantizerError: The stopped run had other options, or another process writes `out`.
        WeightError: A tensor of the model is missing or not finite. Nothing is written then.
    """
    config, method = job.config, job.method
    _check_weights(job)
    with (
        Checkpoint(job.source, device="cpu", dtype=torch.float32, prefix=config.base_prefix) as dense,
        Checkpoint(job.source, device="cpu", dtype=config.dtype, prefix=config.base_prefix) as stored,
    ):
        layers = None if method.walk == "none" else _make_layers(job, dense)
        with open_unfinished(out, config.num_layers, job.options()) as unfinished:
            order = range(config.num_layers)
            if method.walk == "backward":
                assert layers is not None, "its walk is not none"
                _walk_forward(job, layers, dense, unfinished, progress)
                order = range(config.num_layers - 1, -1, -1)
            elif layers is not None and not unfinished.is_done(0) and not unfinished.has("carry", 0):
                unfinished.save("carry", 0, _embed_windows(job, layers))
            for index in order:
                if not unfinished.is_done(index):
                    _quantize_layer(job, layers, dense, unfinished, index, order.step)
                progress(f"layer {index}")
            rest = {name: stored.tensor(name, shape) for name, shape in outer_tensors(config).items()}
            unfinished.save_shard(config.num_layers, rest)
            for name in _COPIED:
                if (job.source / name).exists():
                    shutil.copyfile(job.source / name, unfinished.checkpoint / name)
            raw = read_json(job.source / "config.json")
            unfinished.finish(out, {**raw, "quantization_config": job.format.config()})


def _check_weights(job: Job) -> None:
    """Reads every tensor once. A walk may take hours, and damage must not stop it half way."""
    with Checkpoint(job.source, device="cpu", dtype=torch.float32, prefix=job.config.base_prefix) as dense:
        for name, shape in job.config.tensors().items():
            dense.require_finite(name, dense.tensor(name, shape))


def _make_layers(job: Job, dense: Checkpoint) -> TransformersLayers:
    """Makes what computes the model's layers; it holds the tensors outside layers."""
    assert job.windows is not None, f"{job.method.name} needs calibration windows"
    outer = {name: dense.tensor(name, shape) for name, shape in outer_tensors(job.config).items()}
    return TransformersLayers(job.config, read_json(job.source / "config.json"), job.windows.shape[1] - 1, outer)


def _quantize_layer(
    job: Job, layers: TransformersLayers | None, dense: Checkpoint, unfinished: Unfinished, index: int, step: int
) -> None:
    walk, last = job.method.walk, index + step in (-1, job.config.num_layers)
    carried = None if walk == "none" else unfinished.load("carry", index)
    layer = Layer(
        index,
        layer_groups(job.config, index),
        _read_layer_weights(job.config, dense, index),
        job.config.dtype,
        layers,
        hidden=unfinished.load("hidden", index) if walk == "backward" else carried,
        gradient=carried if walk == "backward" else None,
    )
    done = job.method.quantize(layer, job.bits, job.group_size)
    if done.carry is not None and not last:
        unfinished.save("carry", index + step, done.carry)
    unfinished.save_shard(index, _encode_layer(job, layer, done))
    unfinished.drop("carry", index)
    unfinished.drop("hidden", index)


def _encode_layer(job: Job, layer: Layer, done: QuantizedLayer) -> dict[str, torch.Tensor]:
    """Name in the checkpoint -> tensor, for all tensors of a quantized layer."""
    prefix = job.config.layer_prefix(layer.index)
    tensors: dict[str, torch.Tensor] = {}
    linears = linear_names(layer.groups)
    for name in linears:
        encoded = job.format.encode(f"{prefix}{name}", done.linears[name])
        tensors |= {f"{prefix}{name}.{part}": tensor for part, tensor in encoded.items()}
    matrices = {f"{name}.weight" for name in linears}
    for name, tensor in layer.weights.items():
        if name not in matrices:
            tensors[f"{prefix}{name}"] = done.changed.get(name, tensor).to(job.config.dtype)
    return tensors


def _walk_forward(
    job: Job, layers: TransformersLayers, dense: Checkpoint, unfinished: Unfinished, progress: Progress
) -> None:
    """Saves each layer's input in the dense model, and the last layer's gradient, for the backward walk."""
    config = job.config
    last = config.num_layers - 1
    if unfinished.is_done(last) or unfinished.has("carry", last):
        for index in range(config.num_layers):
            progress(f"layer {index}, forward")
        return
    hidden = _embed_windows(job, layers)
    for index in range(config.num_layers):
        unfinished.save("hidden", index, hidden)
        hidden = forward(layers, _read_layer_weights(config, dense, index), index, hidden)
        progress(f"layer {index}, forward")
    assert job.windows is not None, "a walk has windows"
    unfinished.save("carry", last, head_gradient(layers, hidden, job.windows[:, 1:]))


def _embed_windows(job: Job, layers: TransformersLayers) -> torch.Tensor:
    """The first layer's input [n, S, H]."""
    assert job.windows is not None, "a walk has windows"
    return layers.embed(job.windows[:, :-1])


def _read_layer_weights(config: ModelConfig, dense: Checkpoint, index: int) -> dict[str, torch.Tensor]:
    prefix, transposed = config.layer_prefix(index), transposed_matrices(config, index)
    return {
        name: dense.transposed(f"{prefix}{name}", shape[::-1])
        if name in transposed
        else dense.tensor(f"{prefix}{name}", shape)
        for name, shape in layer_tensors(config, index).items()
    }
