"""The original SqueezeLLM checkpoint: one pickle, with its settings in quant_config.json."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from experiments.conversion.pickles import Number
from experiments.document import ExperimentError
from tmodel import ModelConfig
from tmodel.formats import SqueezeLLM, parse_format
from tmodel.json_files import read_json

SETTINGS_FILE = "quant_config.json"
_COUNT = "sparse_threshold."
"""Begins the name of the number of a layer's outliers."""


def read_settings(source: Path) -> SqueezeLLM | None:
    """From quant_config.json, as the original writes it, or config.json's quantization_config; None where neither is
    SqueezeLLM's.
    """
    own = source / SETTINGS_FILE
    file = own if own.exists() else source / "config.json"
    raw = read_json(file)
    settings = raw if own.exists() else raw.get("quantization_config")
    if not isinstance(settings, dict) or "wbits" not in settings:
        return None
    try:
        found = parse_format({"quant_method": SqueezeLLM.method, **settings})
    except ValueError as error:
        raise ExperimentError([f"{file}: {error}"]) from None
    return found if isinstance(found, SqueezeLLM) else None


def list_problems(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Number], settings: SqueezeLLM, config: ModelConfig
) -> list[str]:
    """What keeps these from being a SqueezeLLM model of these settings."""
    return (
        _list_strange(numbers, tensors)
        or _list_misshapen(tensors, 2**settings.wbits)
        or _list_missing(tensors.keys(), config)
    )


def _list_strange(numbers: Mapping[str, Number], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Numbers that count no layer's outliers, or that the outliers contradict.

    The original writes such counts into the same mapping, and reads them back to make room for the values.
    """
    problems = []
    for name, value in numbers.items():
        if not name.startswith(_COUNT) or type(value) is not int:
            expected = f"expected are tensors, and whole numbers called {_COUNT}<layer>"
            problems.append(f"{name!r} is of type {type(value).__name__}, no tensor; {expected}")
            continue
        vals = f"{name.removeprefix(_COUNT)}.vals"
        count = tensors[vals].numel() if vals in tensors else 0
        if value != count:
            problems.append(f"{name!r} says that {vals!r} has {value} values; it has {count}")
    return problems


def _list_misshapen(tensors: Mapping[str, torch.Tensor], entries: int) -> list[str]:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name.endswith(".lookup_table")}
    if not shapes:
        return ["no tensor is called lookup_table: not a SqueezeLLM model"]
    wrong = {name: shape for name, shape in shapes.items() if len(shape) != 2 or shape[1] != entries}
    return [f"tensor {name!r} has shape {shape}, not [N, {entries}] as wbits says" for name, shape in wrong.items()]


def _list_missing(names: Collection[str], config: ModelConfig) -> list[str]:
    """A layer of the model that the pickle has no codes of."""
    quantization = config.quantization
    assert quantization is not None, "its settings were written"
    layers = (name for shape in quantization.linears for name in shape.names)
    return [
        f"tensor '{layer}.qweight' is missing, which config.json asks for"
        for layer in layers
        if quantization.format.scheme(layer) is not None and f"{layer}.qweight" not in names
    ]
