"""An unfinished checkpoint: a folder beside its destination that a killed run leaves and the next run goes on with.

    .OUT.unfinished/options.json                  the run's options; a run with others cannot go on with this folder
    .OUT.unfinished/carry-00003.safetensors       what the walk brings to layer 3
    .OUT.unfinished/hidden-00003.safetensors      layer 3's input, where a backward walk wants it after a forward one
    .OUT.unfinished/checkpoint/model-00004-of-00037.safetensors        layer 3, as it will be served

A layer is done when its shard is there: a shard is renamed into place after the files that the next layer needs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file, save_file

from tkernels.errors import TKernelsError
from tkernels.files import PARTIAL, check_new_folder, replacing, write_text
from tmodel.json_files import read_json


class QuantizerError(TKernelsError, ValueError):
    """A quantizer cannot do what it was asked, or an unfinished checkpoint was begun with other options."""


@dataclass(frozen=True)
class Unfinished:
    """The folder of an unfinished checkpoint, with a shard for each of `num_layers` layers and one for the rest."""

    folder: Path
    num_layers: int

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def shard(self, index: int) -> Path:
        """The file of layer `index`; num_layers is the rest's."""
        return self.checkpoint / f"model-{index + 1:05}-of-{self.num_layers + 1:05}.safetensors"

    def is_done(self, index: int) -> bool:
        return self.shard(index).exists()

    def save_shard(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        _save(tensors, self.shard(index))

    def save(self, what: str, index: int, tensor: torch.Tensor) -> None:
        """Saves layer `index`'s "carry" or "hidden", whichever `what` names."""
        _save({what: tensor}, self._state(what, index))

    def load(self, what: str, index: int) -> torch.Tensor:
        return load_file(self._state(what, index))[what]

    def has(self, what: str, index: int) -> bool:
        return self._state(what, index).exists()

    def drop(self, what: str, index: int) -> None:
        self._state(what, index).unlink(missing_ok=True)

    def _state(self, what: str, index: int) -> Path:
        return self.folder / f"{what}-{index:05}.safetensors"

    def finish(self, out: Path, config: Mapping[str, Any]) -> None:
        """Writes the index and config.json, and moves the checkpoint to `out` with one rename."""
        weight_map: dict[str, str] = {}
        total = 0
        for index in range(self.num_layers + 1):
            tensors = load_file(self.shard(index))
            weight_map |= dict.fromkeys(tensors, self.shard(index).name)
            total += sum(tensor.nbytes for tensor in tensors.values())
        _write_json(
            self.checkpoint / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )
        _write_json(self.checkpoint / "config.json", config)
        self.checkpoint.rename(out)
        shutil.rmtree(self.folder)


@contextmanager
def open_unfinished(out: Path, num_layers: int, options: Mapping[str, Any]) -> Iterator[Unfinished]:
    """Opens the folder for `out`, new or left by a run with the same options, and locks other processes out.

    Args:
        out: The checkpoint's destination.
        num_layers: Of the model.
        options: Of this run.

    Raises:
        FileExistsError: `out` exists and is not empty.
        QuantizerError: The folder was begun with other options, which the message names, or another process writes it.
    """
    check_new_folder(out, "a checkpoint")
    folder = out.parent / f".{out.name}.unfinished"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(out.parent / f".{out.name}.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise QuantizerError(f"{out}: another process is writing it") from None
    try:
        for left in folder.rglob(f"*{PARTIAL}"):
            left.unlink()
        file = folder / "options.json"
        if file.exists():
            _refuse_change(folder, read_json(file), options)
        else:
            _write_json(file, options)
        (folder / "checkpoint").mkdir(exist_ok=True)
        yield Unfinished(folder, num_layers)
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _refuse_change(folder: Path, begun: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    changed = [key for key in {**begun, **asked} if begun.get(key) != asked.get(key)]
    if changed:
        what = "; ".join(f"{key} was {begun.get(key)!r} and is now {asked.get(key)!r}" for key in changed)
        raise QuantizerError(
            f"{folder} was begun with other options: {what}. Ask for the same to go on, or remove the folder"
        )


def _save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    with replacing(path) as partial:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
