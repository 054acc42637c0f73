"""`tk convert`: the original SqueezeLLM checkpoint, a Python pickle, as safetensors that can be served.

The one place where a pickle is opened, asked for by name, and with torch's loader that makes nothing but tensors.
"""

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file

from experiments.document import ExperimentError
from tmodel import load_config
from tmodel.config import read_json
from tmodel.formats import SqueezeLLM, parse_format
from tmodel.weights import Checkpoint

SHARD_BYTES = 2**30
_PICKLES = (".pt", ".pth", ".bin")
_COPIED = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
_REPLACED = ("config.json", "quant_config.json")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def run(source: Path, out: Path) -> int:
    """Writes `out`, which must not exist yet (or be empty): whole, checked, or not at all."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty directory; a model is written to a new one")
    file = _pickle_in(source)
    settings = _settings(source)
    tensors = _loaded(file, settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that one rename puts the whole model in place.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
            writing = bar.add_task("writing", total=sum(tensor.nbytes for tensor in tensors.values()))
            _write(tensors, unfinished, lambda count: bar.advance(writing, count))
            _write_configs(source, unfinished, settings)
            _check(unfinished, bar)
        unfinished.chmod(0o755)  # mkdtemp's is for the owner alone
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    what = f"SqueezeLLM of {settings.wbits} bits, {len(tensors)} tensors"
    print(f"{out}: {what}, {sum(sizes):,} bytes in {len(sizes)} files")
    return 0


def _pickle_in(source: Path) -> Path:
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


def _settings(source: Path) -> SqueezeLLM:
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


def _loaded(file: Path, settings: SqueezeLLM) -> dict[str, torch.Tensor]:
    """The pickle's tensors, mapped from the file. ExperimentError where it is anything but a SqueezeLLM model."""
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ExperimentError([f"{file}: holds more than tensors, which could run code here: not opened"]) from None
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        first = str(error).splitlines()[0]
        raise ExperimentError([f"{file}: cannot be read as what torch.save writes since 1.6: {first}"]) from None
    if not isinstance(loaded, Mapping) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise ExperimentError([f"{file}: expected a mapping of names to tensors"])
    tables = {name: tensor for name, tensor in loaded.items() if name.endswith(".lookup_table")}
    if not tables:
        raise ExperimentError([f"{file}: no tensor is called lookup_table: not a SqueezeLLM model"])
    problems = [
        f"{file}: tensor {name!r} has shape {list(tensor.shape)}, not [N, {2**settings.wbits}] as wbits says"
        for name, tensor in tables.items()
        if tensor.dim() != 2 or tensor.shape[1] != 2**settings.wbits
    ]
    problems += [
        f"{file}: tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')}, which no SqueezeLLM model has"
        for name, tensor in loaded.items()
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided
    ]
    if problems:
        raise ExperimentError(problems[:5])
    return dict(loaded)


def _shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """The names, in order, in runs of SHARD_BYTES at most, or of one tensor."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _write(tensors: Mapping[str, torch.Tensor], folder: Path, advance: Callable[[int], None]) -> None:
    shards = list(_shards(tensors))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Tensors that share memory are written each on its own.
        save_file({name: tensors[name].contiguous().clone() for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
        advance(sum(tensors[name].nbytes for name in names))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_configs(source: Path, folder: Path, settings: SqueezeLLM) -> None:
    """config.json with the format's settings, and all that belongs to the tokenizer."""
    config = {**read_json(source / "config.json"), "quantization_config": settings.config()}
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.name not in _REPLACED and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check(folder: Path, bar: Progress) -> None:
    """Reads every quantized layer as a server would: what is not one is found now."""
    quantization = load_config(folder).quantization
    assert quantization is not None, "it was written above"
    with Checkpoint(folder, device="cpu", dtype=torch.float32) as checkpoint:
        for shape in bar.track(quantization.linears, description="checking"):
            for name, outputs in zip(shape.names, shape.outputs, strict=True):
                if quantization.format.scheme(name) is not None:
                    quantization.format.read(checkpoint, name, outputs, shape.inputs)
