"""The architectures that can be served, one file each: a module here with an `ARCHITECTURE` is all it takes."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Protocol

import torch

from tkernels import KernelSet, PrepareReport
from tmodel.batch import Batch
from tmodel.config import ConfigError, HuggingFaceConfig, ModelConfig
from tmodel.kv_cache import KVCache
from tmodel.quantization import LinearShape
from tmodel.weights import Checkpoint


class Model(Protocol):
    """What every architecture builds: packed tokens in, logits out."""

    config: ModelConfig
    prepare_report: PrepareReport
    """What it cost to prepare the quantized weights; all 0 where there are none."""

    @property
    def weight_bytes(self) -> int:
        """Of all weights as they are kept, a tied head's none."""
        ...

    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Logits [n, vocab] at `batch.logit_indices`, float32 or float64.

        This step's keys and values are written to `kv_cache`.
        """
        ...


@dataclass(frozen=True)
class Architecture:
    """`name` is the one in config.json's `architectures`.

    `resolve` turns the file's fields into a ModelConfig with the end-token ids given, or raises ConfigError;
    `build` takes the weights out of the checkpoint; `linears` lists the layers that may be quantized, none where the
    architecture serves dense models alone.
    """

    name: str
    resolve: Callable[[HuggingFaceConfig, tuple[int, ...]], ModelConfig]
    build: Callable[[ModelConfig, Checkpoint, KernelSet], Model]
    linears: Callable[[ModelConfig], Sequence[LinearShape]] = field(default=lambda config: ())


@cache
def known_architectures() -> Mapping[str, Architecture]:
    """Every architecture of this folder, by name."""
    found: dict[str, Architecture] = {}
    for module_info in pkgutil.iter_modules(__path__):
        architecture: Architecture = importlib.import_module(f"{__name__}.{module_info.name}").ARCHITECTURE
        if architecture.name in found:
            raise ValueError(f"{module_info.name}.py declares {architecture.name}, which another file declares too")
        found[architecture.name] = architecture
    return MappingProxyType(found)


def find_architecture(name: object) -> Architecture:
    """The architecture `name`; ConfigError lists those that there are."""
    known = known_architectures()
    if isinstance(name, str) and name in known:
        return known[name]
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"unknown architecture {name!r}; known are: {', '.join(sorted(known))}{hint}")
