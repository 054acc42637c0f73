"""What an architecture is, and what the rest of the house reads of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from tkernels import KernelSet, PrepareReport
from tkernels.variant import AxisRanges
from tmodel.batch import Batch, KVCache
from tmodel.cache_kinds import CacheKind, check_kinds, pages_for
from tmodel.fields import HuggingFaceConfig
from tmodel.quantization import LinearShape, Quantization
from tmodel.weights import Checkpoint

Axes = dict[str, AxisRanges | tuple[AxisRanges, ...]]
"""Ops, each with every axis it is called at: a value or (low, high). One called in several ways has a set for each."""


@dataclass(frozen=True)
class Limits:
    """The most that a model is asked for, which the kernels are chosen for.

    Attributes:
        max_num_tokens: Tokens in one step.
        max_num_seqs: Sequences in one step.
        max_model_len: Tokens of one sequence, prompt and output.
        block_size: Tokens of a cache block.
        num_blocks: Blocks of the KV cache.
        shared_prefixes: Whether batches have groups of rows that share prefixes.
    """

    max_num_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    shared_prefixes: bool = False


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


@runtime_checkable
class SplitModel(Protocol):
    """A model whose head may be applied to a part of a step's tokens at a time.

    `model(batch, kv_cache)` is `model.compute_logits(model.compute_hidden(batch, kv_cache))`.

    Steps with prompts are recorded in pieces for it where each of its layers attends through PagedAttention. Nothing
    but that may then read a batch's tables, lengths, counts and logit_indices, but for whether all logits are wanted.
    """

    def compute_hidden(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """The final hidden states [n, H] at `batch.logit_indices`; writes the caches as a call does."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of final hidden states [n, H], float32 or float64."""
        ...


@dataclass(frozen=True)
class Architecture:
    """One architecture: how its config.json is read, what its tensors are called, what it computes and with which ops.

    Attributes:
        name: The one in config.json's `architectures`; transformers' class of that name is what it must compute.
        fields: The fields of config.json that decide what is computed, with that class's defaults.
        resolve: (fields, end-token ids) -> ModelConfig. ConfigError for what it would not compute as it was trained.
        tensors: Name -> shape of every tensor of a dense checkpoint. A layer's stand together, the first layer's first.
        axes: The ops that the model calls, with their axes, within the limits.
        build: Takes the weights out of the checkpoint.
        linears: The layers that may be quantized, in the order of computation; none where only dense models are served.
        layers: What the names of the first layer's tensors begin with, ahead of ".0.".
    """

    name: str
    fields: type[HuggingFaceConfig]
    resolve: Callable[[Any, tuple[int, ...]], ModelConfig]
    tensors: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
    axes: Callable[[ModelConfig, Limits], Axes]
    build: Callable[[ModelConfig, Checkpoint, KernelSet], Model]
    linears: Callable[[ModelConfig], Sequence[LinearShape]] = lambda config: ()
    layers: str = "model.layers"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What cache, engine, quantizers and simulation read of a model. What its layers alone read is in `fields`.

    Attributes:
        architecture: What it is one of.
        fields: config.json, as the architecture reads it.
        num_layers: Decoder layers.
        num_heads: Query heads, Hq.
        num_kv_heads: Key-value heads, Hkv.
        head_dim: Dims of a head, D.
        windows: Of each layer, the keys that a query sees, itself included, or None for all of them.
        max_position_embeddings: Tokens of the longest sequence that the model was made for.
        eos_token_ids: The tokens that end a generation.
        dtype: The one that the checkpoint was saved for; a caller is free to load it as another.
        quantization: Which linear layers are quantized, and how; None is none of them.
        cache_kinds: What a sequence keeps, by groups that share the layers out. An architecture that gives none keeps
            pages of keys and values in every layer, those of the last window alone where every layer has one.
    """

    architecture: Architecture
    fields: HuggingFaceConfig
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    quantization: Quantization | None = None
    cache_kinds: tuple[CacheKind, ...] = ()

    def __post_init__(self) -> None:
        if not self.cache_kinds:
            pages = pages_for(self.windows, self.num_kv_heads, self.head_dim)
            object.__setattr__(self, "cache_kinds", (pages,))
        check_kinds(self.cache_kinds, self.num_layers)

    @property
    def vocab_size(self) -> int:
        """Tokens that there are."""
        return self.fields.vocab_size

    def linears(self) -> Sequence[LinearShape]:
        """The linear layers that may be quantized, in the order of computation."""
        return self.architecture.linears(self)

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the dense checkpoint."""
        return self.architecture.tensors(self)

    @property
    def base_prefix(self) -> str:
        """What the names of all tensors but the head's begin with: "model."."""
        return f"{self.architecture.layers.partition('.')[0]}."

    def layer_prefix(self, index: int) -> str:
        """What the names of layer `index`'s tensors begin with: "model.layers.0."."""
        return f"{self.architecture.layers}.{index}."
