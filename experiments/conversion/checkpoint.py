"""A checkpoint of Python pickles as safetensors that can be served: whole and loaded once, or not there at all.

The one place where a pickle is opened, asked for by name. A process of its own opens it, with torch's loader that makes
nothing but tensors, and writes the safetensors; this one reads these, as it reads any.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

import tkernels
from experiments.conversion import squeezellm
from experiments.conversion.pickles import SUFFIXES, Number, read_pickle
from experiments.document import ExperimentError
from tkernels.files import new_folder
from tkernels.isolation import Tell, run_forked
from tmodel import Architectures, ConfigError, Limits, ModelConfig, WeightError, kernel_axes, load_config, load_model
from tmodel.formats import SqueezeLLM
from tmodel.json_files import read_json
from tmodel.weights import INDEX, read_index

SHARD_BYTES = 2**30
_SINGLE = "pytorch_model.bin"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_COPIED = ("*.json", "*.txt", "*.jinja", "tokenizer.model")


@dataclass(frozen=True)
class PickledCheckpoint:
    """A checkpoint whose tensors are in pickles.

    Attributes:
        source: Its directory.
        file: The pickle, or the index of several.
        pickles: Each pickle, with the tensors that the index promises of it.
        settings: Of the codes of an original SqueezeLLM checkpoint; None of any other, whose config.json says all.
    """

    source: Path
    file: Path
    pickles: Mapping[Path, Collection[str]]
    settings: SqueezeLLM | None


@dataclass
class Conversion:
    """What has become of a checkpoint's pickles.

    Attributes:
        num_tensors: That are written or will be.
        numbers: The names of plain numbers, which are left out.
        second_names: Of tensors that a pickle holds under two names, the ones that the model does not ask for.
    """

    num_tensors: int = 0
    numbers: list[str] = field(default_factory=list)
    second_names: list[str] = field(default_factory=list)


def find_checkpoint(source: Path) -> PickledCheckpoint:
    """Finds the pickles of a directory; none is opened.

    Raises:
        ExperimentError: There are none, or it is not told which of several are the checkpoint.
    """
    if not source.is_dir():
        raise ExperimentError([f"{source}: not a directory with config.json and {_SINGLE}, or another pickle"])
    file, pickles = _find_pickles(source)
    for pickle, names in pickles.items():
        if not pickle.exists():
            raise ExperimentError([f"{pickle}: no such file; {_PICKLE_INDEX} says that it holds {min(names)!r}"])
    return PickledCheckpoint(source, file, pickles, squeezellm.read_settings(source))


def _find_pickles(source: Path) -> tuple[Path, dict[Path, Collection[str]]]:
    index = source / _PICKLE_INDEX
    if index.exists():
        return index, {source / name: names for name, names in read_index(index, ".bin").items()}
    if (source / _SINGLE).exists():
        return source / _SINGLE, {source / _SINGLE: ()}
    found = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES)
    if len(found) == 1:
        return found[0], {found[0]: ()}
    if found:
        names = ", ".join(path.name for path in found)
        raise ExperimentError([f"{source}: has {names}; expected one pickle, {_SINGLE} or {_PICKLE_INDEX}"])
    if any(source.glob("*.safetensors")):
        raise ExperimentError([f"{source}: holds safetensors, which need no conversion; only pickles are converted"])
    raise ExperimentError([f"{source}: has no pickle ({', '.join('*' + end for end in SUFFIXES)})"])


def write_safetensors(
    original: PickledCheckpoint, out: Path, architectures: Architectures, advance: Callable[[Conversion, int], None]
) -> Conversion:
    """Writes the model whole, and as a server loads it, or not at all.

    Args:
        original: See `find_checkpoint`.
        out: New, or an empty directory.
        architectures: Those that the model may be of.
        advance: Called with what is known by then and the number of tensors that were written.

    Raises:
        FileExistsError: There is something in `out`.
        ExperimentError: The model could not be served; it names the tensor.
    """
    with new_folder(out, "a model") as folder:
        try:
            _write_configs(original, folder)
            config = load_config(folder, architectures)
            conversion = _convert_in_a_child(original, folder, config, advance)
            _check_model(folder, config)
        except (ConfigError, WeightError) as error:
            raise ExperimentError([_name_source(original.file, folder, str(error))]) from None
    return conversion


def _convert_in_a_child(
    original: PickledCheckpoint, folder: Path, config: ModelConfig, advance: Callable[[Conversion, int], None]
) -> Conversion:
    """Has a fork of this process open the pickles and write the shards."""
    conversion = Conversion()
    problems: list[str] = []

    def hear(message: Any) -> None:
        match message:
            case {"found": dict() as found}:
                vars(conversion).update(found)
                advance(conversion, 0)
            case {"written": int() as count}:
                advance(conversion, count)
            case {"problems": list() as told}:
                problems.extend(map(str, told))

    def convert(tell: Tell) -> None:
        torch.set_num_threads(1)  # a fork has none of the threads that torch may have begun
        try:
            tensors, found = _read_tensors(original, config)
            tell({"found": vars(found)})
            _write_shards(tensors, folder, lambda count: tell({"written": count}))
        except ExperimentError as error:
            tell({"problems": error.problems})

    ending = run_forked(convert, hear)
    if problems:
        raise ExperimentError(problems)
    if ending.death is not None:
        raise ExperimentError([f"{original.file}: the process that opened it ended: {ending.death}"])
    return conversion


def _read_tensors(original: PickledCheckpoint, config: ModelConfig) -> tuple[dict[str, torch.Tensor], Conversion]:
    """The tensors to write, and what is left out; ExperimentError where the pickles hold something else."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Number] = {}
    for file, promised in original.pickles.items():
        own, own_numbers = read_pickle(file)
        if missing := sorted(set(promised) - own.keys() - own_numbers.keys()):
            raise ExperimentError([f"{file}: tensor {missing[0]!r} is missing; {_PICKLE_INDEX} says that it is there"])
        if twice := sorted(own.keys() & tensors.keys()):
            raise ExperimentError([f"{file}: tensor {twice[0]!r} is also in another of the pickles"])
        tensors |= own
        numbers |= own_numbers
    if original.settings is not None:
        found = squeezellm.list_problems(tensors, numbers, original.settings, config)
        if found:
            raise ExperimentError([f"{original.file}: {problem}" for problem in found[:5]])
    second = _list_second_names(tensors, config.tensors().keys())
    kept = {name: tensor for name, tensor in tensors.items() if name not in second}
    _check_expanded(original.file, kept, config)
    return kept, Conversion(len(kept), sorted(numbers), second)


def _list_second_names(tensors: Mapping[str, torch.Tensor], asked: Collection[str]) -> list[str]:
    """Names of tensors that are another's too, which the model asks for by that name alone: a tied head's."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            places.setdefault(place, []).append(name)
    shared = [names for names in places.values() if any(name in asked for name in names)]
    return sorted(name for names in shared for name in names if name not in asked)


def _check_expanded(file: Path, tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> None:
    """Checks that what the model does not ask for is no larger than the pickles: a few bytes may be shown as many.

    Raises:
        ExperimentError: It is larger.
    """
    asked = config.tensors()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    others = {
        name: tensor.nbytes
        for name, tensor in tensors.items()
        if tuple(tensor.shape) not in (asked.get(name), asked.get(f"{config.base_prefix}{name}"))
    }
    if sum(others.values()) > sum(storages.values()):
        largest = max(others, key=lambda name: others[name])
        raise ExperimentError(
            [
                f"{file}: tensor {largest!r} has shape {list(tensors[largest].shape)}, which config.json does not ask "
                f"for, and tensors like it take {sum(others.values())} bytes, made of {sum(storages.values())} stored"
            ]
        )


def _write_shards(tensors: Mapping[str, torch.Tensor], folder: Path, advance: Callable[[int], None]) -> None:
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        # Tensors that share memory are written each on its own.
        save_file({name: tensors[name].contiguous().clone() for name in names}, folder / file, {"format": "pt"})
        advance(len(names))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_configs(original: PickledCheckpoint, folder: Path) -> None:
    """config.json, with the settings of a SqueezeLLM checkpoint, and all that belongs to the tokenizer."""
    config = read_json(original.source / "config.json")
    replaced = {"config.json"}
    if original.settings is not None:
        config["quantization_config"] = original.settings.config()
        replaced.add(squeezellm.SETTINGS_FILE)
    for pattern in _COPIED:
        for path in original.source.glob(pattern):
            if path.name not in replaced and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


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
