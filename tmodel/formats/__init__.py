"""The formats of quantized checkpoints, one file each: its class here, by its `quant_method`, is all that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from tkernels.names import suggest_name
from tmodel.formats.auto_round import AutoRound, parse_auto_round
from tmodel.formats.awq import AWQ
from tmodel.formats.base import FormatWarning, QuantizationFormat, Scheme, parse_settings
from tmodel.formats.compressed_tensors import CompressedTensors
from tmodel.formats.fp8 import FP8
from tmodel.formats.gptq import GPTQ
from tmodel.formats.mxfp4 import MXFP4
from tmodel.formats.squeezellm import SqueezeLLM
from tmodel.formats.unsupported import refuse_gguf, refuse_unsupported
from tmodel.json_files import ConfigError, read_json

__all__ = [
    "AWQ",
    "FORMATS",
    "FP8",
    "GPTQ",
    "MXFP4",
    "AutoRound",
    "CompressedTensors",
    "FormatWarning",
    "QuantizationFormat",
    "Scheme",
    "SqueezeLLM",
    "find_format",
    "parse_format",
    "refuse_gguf",
]

FORMATS: Mapping[str, type[BaseModel]] = MappingProxyType(
    {
        **{format.method: format for format in (GPTQ, AWQ, CompressedTensors, SqueezeLLM, AutoRound, FP8, MXFP4)},
        AutoRound.old_method: AutoRound,
    }
)

_QUANTIZE_CONFIG = "quantize_config.json"  # GPTQ's own
_QUANT_CONFIG = "quant_config.json"  # AWQ's and SqueezeLLM's own
_MODELOPT_CONFIG = "hf_quant_config.json"  # ModelOpt's own, which none of the formats here is


def parse_format(raw: Mapping[str, Any]) -> QuantizationFormat:
    """Parses a `quantization_config`.

    Args:
        raw: The mapping as config.json holds it, with its `quant_method`.

    Returns:
        The format with the checkpoint's settings: auto-round's files are of GPTQ's, AWQ's or fp8's.

    Raises:
        ConfigError: The method is unknown, or a setting of it is missing, wrong or not supported.
    """
    refuse_unsupported(raw)
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        hint = suggest_name(method, FORMATS)
        raise ConfigError(f"unknown quant_method {method!r}; supported are {', '.join(FORMATS)}{hint}")
    try:
        kind: Any = FORMATS[method]
        return parse_auto_round(raw) if kind is AutoRound else parse_settings(kind, raw)
    except ConfigError as error:
        raise ConfigError(f"quant_method {method}: {error}") from error.__cause__


def find_format(directory: Path, raw: Mapping[str, Any]) -> tuple[Path, QuantizationFormat] | None:
    """Finds how a checkpoint is quantized.

    Args:
        directory: The checkpoint's.
        raw: Its config.json.

    Returns:
        (the file that names the format, the format); None where the checkpoint is dense.

    Raises:
        ConfigError: Settings are damaged or not supported, or two files disagree. The message names the file.
    """
    formats: dict[str, QuantizationFormat] = {}
    for name, settings in _read_settings(directory, raw).items():
        try:
            formats[name] = parse_format(settings)
        except ConfigError as error:
            raise ConfigError(f"{directory / name}: quantization_config: {error}") from error.__cause__
    named = list(formats.items())
    for name, other in named[1:]:
        if other != named[0][1]:
            difference = _describe_difference(other, named[0][1])
            raise ConfigError(f"{directory / name}: it disagrees with {named[0][0]}: {difference}")
    return (directory / named[0][0], named[0][1]) if named else None


def _read_settings(directory: Path, raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """File name -> its quantization settings with their `quant_method`, for each file that has some."""
    settings: dict[str, dict[str, Any]] = {}
    if raw.get("quantization_config") is not None:
        settings["config.json"] = raw["quantization_config"]
    if (directory / _QUANTIZE_CONFIG).exists():
        settings[_QUANTIZE_CONFIG] = {"quant_method": GPTQ.method, **read_json(directory / _QUANTIZE_CONFIG)}
    if (directory / _QUANT_CONFIG).exists():
        own = read_json(directory / _QUANT_CONFIG)
        method = SqueezeLLM.method if "wbits" in own else AWQ.method
        settings[_QUANT_CONFIG] = {"quant_method": method, **own}
    if not settings and (directory / _MODELOPT_CONFIG).exists():
        inner = read_json(directory / _MODELOPT_CONFIG).get("quantization")
        settings[_MODELOPT_CONFIG] = {"quant_method": "modelopt", **(inner if isinstance(inner, dict) else {})}
    return settings


def _describe_difference(one: Any, other: Any) -> str:
    if type(one) is not type(other):
        return f"{one.method} and {other.method}"
    ours, theirs = one.model_dump(), other.model_dump()
    return "; ".join(f"{key} is {ours[key]!r} and {theirs[key]!r}" for key in ours if ours[key] != theirs[key])
