"""The original SqueezeLLM checkpoint, a Python pickle, as safetensors that can be served: what `tk convert` does.

The one place where a pickle is opened, asked for by name, and with torch's loader that makes nothing but tensors.
"""

import json
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

import tkernels
from experiments.document import ExperimentError
from tkernels.files import new_folder
from tmodel import Architectures, ConfigError, Limits, ModelConfig, WeightError, kernel_axes, load_config, load_model
from tmodel.formats import SqueezeLLM, parse_format
from tmodel.json_files import read_json

SHARD_BYTES = 2**30
_PICKLES = (".pt", ".pth", ".bin")
_COPIED = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
_REPLACED = ("config.json", "quant_config.json")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
_SUPPORTED = f"dense ones of {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
_COUNT = "sparse_threshold."
"""Begins the name of the number of a layer's outliers."""
_EXPECTED = "expected what torch.save writes of tensors since version 1.6"


@dataclass(frozen=True)
class OriginalModel:
    """A checkpoint as SqueezeLLM's authors write it.

    Attributes:
        source: its directory.
        file: the pickle.
        settings: of its codes.
        tensors: the pickle's, mapped from the file.
    """

    source: Path
    file: Path
    settings: SqueezeLLM
    tensors: Mapping[str, torch.Tensor]


def read_original(source: Path) -> OriginalModel:
    """Opens the checkpoint; ExperimentError where its pickle is anything but tensors of a SqueezeLLM model."""
    file, settings = _find_pickle(source), _read_settings(source)
    return OriginalModel(source, file, settings, _load_pickle(file, settings))


def write_safetensors(
    original: OriginalModel, out: Path, architectures: Architectures, advance: Callable[[int], None]
) -> None:
    """Writes the model whole, and as a server loads it, or not at all.

    Args:
        out: new, or an empty directory.
        architectures: those that the model may be of.
        advance: called with the number of tensors that were written.

    Raises:
        FileExistsError: There is something in `out`.
        ExperimentError: The model could not be served; it names the tensor.
    """
    with new_folder(out, "a model") as folder:
        try:
            _write_configs(original.source, folder, original.settings)
            config = load_config(folder, architectures)
            _refuse_missing(config, original)
            _write_shards(original.tensors, folder, advance)
            _check_model(folder, config)
        except (ConfigError, WeightError) as error:
            raise ExperimentError([_name_source(original.file, folder, str(error))]) from None


def _find_pickle(source: Path) -> Path:
    if not source.is_dir():
        raise ExperimentError([f"{source}: not a directory with config.json, quant_config.json and one pickle"])
    pickles = sorted(path for path in source.iterdir() if path.suffix in _PICKLES)
    if len(pickles) == 1:
        return pickles[0]
    if pickles:
        raise ExperimentError([f"{source}: has {', '.join(path.name for path in pickles)}; expected one pickle"])
    if any(source.glob("*.safetensors")):
        raise ExperimentError([f"{source}: holds safetensors, which need no conversion; only pickles are converted"])
    raise ExperimentError([f"{source}: has no pickle ({', '.join('*' + end for end in _PICKLES)})"])


def _read_settings(source: Path) -> SqueezeLLM:
    """From quant_config.json, as the original writes it, or config.json's quantization_config."""
    own = source / "quant_config.json"
    file = own if own.exists() else source / "config.json"
    raw = read_json(file)
    settings = raw if own.exists() else raw.get("quantization_config")
    if not isinstance(settings, dict) or "wbits" not in settings:
        expected = 'quant_config.json with {"wbits": 3} or {"wbits": 4}'
        raise ExperimentError([f"{file}: no wbits: only SqueezeLLM checkpoints are converted; expected {expected}"])
    try:
        found = parse_format({"quant_method": SqueezeLLM.method, **settings})
    except ValueError as error:
        raise ExperimentError([f"{file}: {error}"]) from None
    assert isinstance(found, SqueezeLLM)
    return found


def _load_pickle(file: Path, settings: SqueezeLLM) -> dict[str, torch.Tensor]:
    """The pickle's tensors, mapped from the file. ExperimentError where it is anything but a SqueezeLLM model."""
    tensors = _load_tensors(file)
    problems = _list_unsupported(tensors) or _list_misshapen(tensors, 2**settings.wbits)
    if problems:
        raise ExperimentError([f"{file}: {problem}" for problem in problems[:5]])
    return tensors


def _list_unsupported(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    kinds = ((name, _describe_unsupported(tensor)) for name, tensor in tensors.items())
    return [f"tensor {name!r} is {what}; supported are {_SUPPORTED}" for name, what in kinds if what]


def _list_misshapen(tensors: Mapping[str, torch.Tensor], entries: int) -> list[str]:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name.endswith(".lookup_table")}
    if not shapes:
        return ["no tensor is called lookup_table: not a SqueezeLLM model"]
    wrong = {name: shape for name, shape in shapes.items() if len(shape) != 2 or shape[1] != entries}
    return [f"tensor {name!r} has shape {shape}, not [N, {entries}] as wbits says" for name, shape in wrong.items()]


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    # torch's own complaints about such files advise against what is done here: none is passed on.
    with _open_archive(file) as archive:
        # What torch.jit.save writes: it would be handed to a loader of code.
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise ExperimentError([f"{file}: a TorchScript archive, which holds code: not opened; {_EXPECTED}"])
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ExperimentError([f"{file}: holds more than tensors, which could run code here: not opened"]) from None
    except (RuntimeError, ValueError, EOFError):
        raise ExperimentError([f"{file}: a zip archive that is damaged or not torch.save's; {_EXPECTED}"]) from None
    if not isinstance(loaded, Mapping) or not all(isinstance(name, str) for name in loaded):
        raise ExperimentError([f"{file}: expected a mapping of names to tensors"])
    tensors = {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in loaded.items() if name not in tensors}
    problems = _list_strange(others, tensors)
    if problems:
        raise ExperimentError([f"{file}: {problem}" for problem in problems[:5]])
    return tensors


def _list_strange(others: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What is no tensor and no count of a layer's outliers, or a count that they contradict.

    The original writes such counts into the same mapping, and reads them back to make room for the values.
    """
    problems = []
    for name, value in others.items():
        if not name.startswith(_COUNT) or type(value) is not int:
            expected = f"expected are tensors, and whole numbers called {_COUNT}<layer>"
            problems.append(f"{name!r} is of type {type(value).__name__}, no tensor; {expected}")
            continue
        vals = f"{name.removeprefix(_COUNT)}.vals"
        count = tensors[vals].numel() if vals in tensors else 0
        if value != count:
            problems.append(f"{name!r} says that {vals!r} has {value} values; it has {count}")
    return problems


def _open_archive(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except zipfile.BadZipFile:
        what = "empty, cut short, or a pickle of the old kind, which is not opened"
        raise ExperimentError([f"{file}: {what}; {_EXPECTED}"]) from None


def _describe_unsupported(tensor: torch.Tensor) -> str | None:
    """What keeps the tensor out of a safetensors file that is served; None where nothing does."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else f"sparse ({str(tensor.layout).removeprefix('torch.')})"
    if tensor.device.type != "cpu":
        return f"without values (device {tensor.device.type})"
    return None if tensor.dtype in _DTYPES else str(tensor.dtype).removeprefix("torch.")


def _write_shards(tensors: Mapping[str, torch.Tensor], folder: Path, advance: Callable[[int], None]) -> None:
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        # Tensors that share memory are written each on its own.
        save_file({name: tensors[name].contiguous().clone() for name in names}, folder / file)
        advance(len(names))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_configs(source: Path, folder: Path, settings: SqueezeLLM) -> None:
    """config.json with the format's settings, and all that belongs to the tokenizer."""
    config = {**read_json(source / "config.json"), "quantization_config": settings.config()}
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.name not in _REPLACED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _refuse_missing(config: ModelConfig, original: OriginalModel) -> None:
    """Before gigabytes are written: a layer of the model that the pickle has no codes of."""
    assert config.quantization is not None, "its settings were written"
    names = (name for shape in config.quantization.linears for name in shape.names)
    for name in names:
        if config.quantization.format.scheme(name) is not None and f"{name}.qweight" not in original.tensors:
            missing = f"tensor '{name}.qweight' is missing, which config.json asks for"
            raise ExperimentError([f"{original.file}: {missing}"])


def _check_model(folder: Path, config: ModelConfig) -> None:
    """Loads the model on the host as a server would, in the memory that one takes: what it refuses is found now."""
    limits = Limits(max_num_tokens=1, max_num_seqs=1, max_model_len=1, block_size=16, num_blocks=1)
    axes = kernel_axes(config, limits)
    kernels = tkernels.select({}, device="cpu", dtype=config.dtype, axes=axes)
    load_model(folder, config, kernels, device="cpu", dtype=config.dtype)


def _name_source(file: Path, folder: Path, problem: str) -> str:
    """What was found in `folder`, which is gone, by the names of what it was made of."""
    shard = r"model(-\d{5}-of-\d{5})?\.safetensors(?!\.index)"
    return re.sub(rf"{shard}(, {shard})*", lambda _: file.name, problem).replace(str(folder), str(file.parent))
