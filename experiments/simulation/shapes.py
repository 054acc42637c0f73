"""Models by name, as far as the time of a step depends on them; all of it follows from their configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.document import ExperimentError
from tsched.resolved_options import UnitSizes
from tsched.torch_free import suggest_name

if TYPE_CHECKING:  # it loads torch
    from tmodel import ModelConfig
    from tmodel.quantization import LinearShape

ELEMENT_BYTES = 2  # bfloat16: weights that are not quantized, keys, values and products


@dataclass(frozen=True)
class ModelShape:
    """What a step's time and a pool's size depend on.

    Attributes:
        name: As it was asked for.
        num_layers: Decoder layers.
        query_width: Of all query heads of a layer, Hq D.
        active_weights: Elements of the layers' matrices that a token is multiplied with, of experts the chosen ones'.
        layer_bytes: Of all layers' matrices as they are stored, and of experts' biases.
        head_weights: Elements of the last projection.
        head_bytes: Of these, as they are stored.
        weight_bytes: Of all weights in memory.
        quantization: The method of the layers that are quantized; None where all weights are bfloat16.
        kv_bytes_per_token: Of what a token leaves in the cache, all layers together.
        state_bytes: Of a sequence's state, where layers keep one.
        state_interval: Blocks between two states of a sequence that are kept for later prefixes.
        window: Tokens before which a sequence's blocks are given back; None where they are kept to its end.
        layer_windows: Of each layer that has one, though others have none: the keys that a query sees.
        expert_bytes: Of all experts' matrices and biases, which are among the layers'.
        chosen: The share of a layer's experts that a token is given, K / E.
    """

    name: str
    num_layers: int
    query_width: int
    active_weights: int
    layer_bytes: int
    head_weights: int
    head_bytes: int
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int = 0
    state_interval: int = 1
    window: int | None = None
    layer_windows: tuple[int, ...] = ()
    expert_bytes: int = 0
    chosen: float = 1.0
    quantization: str | None = None

    def read_bytes(self, num_tokens: int) -> float:
        """Of the layers' weights that a step of so many tokens reads: of experts as many as are distinct on average,
        where tokens choose evenly and independently.
        """
        distinct = 1 - (1 - self.chosen) ** num_tokens
        return self.layer_bytes - self.expert_bytes + self.expert_bytes * distinct

    def weight_traffic(self, num_tokens: int) -> float:
        """How many times the weights of a step of one token a step reads that verifies so many of one sequence. All of
        them are sampled, so the last projection is read too.
        """
        one, several = (self.read_bytes(tokens) + self.head_bytes for tokens in (1, num_tokens))
        return several / one

    def unread_bytes(self, num_tokens: int) -> int:
        """Of the keys and values of a sequence of `num_tokens`, those that are kept for layers without a window alone:
        in the layers with one, no later token reads them.
        """
        of_layer = self.kv_bytes_per_token // self.num_layers
        return of_layer * sum(max(0, num_tokens + 1 - window) for window in self.layer_windows)

    def unit_sizes(self, page_size: int) -> UnitSizes:
        """What a pool of blocks of `page_size` tokens, and of states, takes."""
        return UnitSizes(
            block_bytes=page_size * self.kv_bytes_per_token,
            state_bytes=self.state_bytes,
            state_interval=self.state_interval,
            window=self.window,
        )


_PUBLISHED: Mapping[str, tuple[int, int, int, int, bool]] = {
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
}
"""Beside the presets: what config.json of Qwen/<name> on the Hugging Face hub has other than Qwen3-4B's."""
_OWN_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")


def shape_of(config: ModelConfig, name: str) -> ModelShape:
    """The shape of the model that `config` describes."""
    import torch

    from tmodel import bytes_per_state, cache_window, kv_bytes_per_block, state_interval
    from tmodel.fields import ExpertsConfig

    fields = config.fields
    chosen = fields.num_experts_per_tok / fields.num_experts if isinstance(fields, ExpertsConfig) else 1.0
    return ModelShape(
        name=name,
        num_layers=config.num_layers,
        query_width=config.num_heads * config.head_dim,
        **_count_weights(config, chosen),
        kv_bytes_per_token=kv_bytes_per_block(config, 1, torch.bfloat16),
        state_bytes=bytes_per_state(config, 1, torch.bfloat16),
        state_interval=state_interval(config),
        window=cache_window(config),
        layer_windows=tuple(size for size in config.windows if size is not None and cache_window(config) is None),
        chosen=chosen,
        quantization=None if config.quantization is None else config.quantization.format.method,
    )


def _count_weights(config: ModelConfig, chosen: float) -> dict[str, int]:
    """The numbers and bytes of weights that a ModelShape has, by their names there."""
    from tmodel.quantization import count_weight_bytes

    tensors, layers, linears = config.tensors(), config.architecture.layers, config.linears()
    heads = [one for one in linears if not one.names[0].startswith(layers)]
    experts = [one for one in linears if one.num_experts]
    shared = [one for one in linears if not one.num_experts and one not in heads]
    listed = {name for one in linears for name in one.tensors()}
    # Routers; or all matrices, where the architecture lists no linear layers.
    unlisted = sum(
        math.prod(shape)
        for tensor, shape in tensors.items()
        if tensor.startswith(layers) and tensor not in listed and len(shape) > 1
    )

    def num_weights(linears: Sequence[LinearShape]) -> int:
        return sum(one.num_weights for one in linears)

    def stored_bytes(linears: Sequence[LinearShape]) -> int:
        return sum(count_weight_bytes(one, config.quantization, ELEMENT_BYTES) for one in linears)

    expert_biases = sum(math.prod(shape) for one in experts for shape in one.tensors().values()) - num_weights(experts)
    expert_bytes = stored_bytes(experts) + ELEMENT_BYTES * expert_biases
    # A head that is tied is the embedding; one that is not has its size.
    vocabularies = [shape for tensor, shape in tensors.items() if not tensor.startswith(layers) and len(shape) == 2]
    head_weights = max(math.prod(shape) for shape in vocabularies if shape[0] == config.vocab_size)
    others = sum(map(math.prod, tensors.values())) - num_weights(linears)
    return {
        "active_weights": unlisted + num_weights(shared) + round(chosen * num_weights(experts)),
        "layer_bytes": ELEMENT_BYTES * unlisted + stored_bytes(shared) + expert_bytes,
        "head_weights": head_weights,
        "head_bytes": stored_bytes(heads) or ELEMENT_BYTES * head_weights,
        "weight_bytes": ELEMENT_BYTES * others + stored_bytes(linears),
        "expert_bytes": expert_bytes,
    }


def find_shape(name: str, architectures_from: Sequence[Path] = ()) -> ModelShape:
    """The shape of the Hugging Face directory `name`, else of a preset or a model published under that name.

    Args:
        name: As it was asked for.
        architectures_from: Folders of more architectures that a directory may be of.

    Raises:
        ExperimentError: There is none, or it cannot be served; it lists the alternatives.
    """
    from tmodel import PRESETS, RANDOM_PRESETS, architectures_with, load_config  # loads torch
    from tmodel.loading import parse_config
    from tmodel.model_names import RANDOM

    directory = Path(name)
    try:
        architectures = architectures_with(architectures_from)
        if name and directory.is_dir():  # Path("") would be the working directory
            return shape_of(load_config(directory, architectures), directory.resolve().name)
    except ValueError as error:
        raise ExperimentError([f"--model: {error}"]) from None
    published = {**{preset: recipe.config for preset, recipe in PRESETS.items()}, **RANDOM_PRESETS}
    for other, sizes in _PUBLISHED.items():
        published[other] = {**RANDOM_PRESETS["Qwen3-4B"], **dict(zip(_OWN_SIZES, sizes, strict=True))}
    preset = name.removeprefix(RANDOM) if name.removeprefix(RANDOM) in RANDOM_PRESETS else name
    if preset in published:
        return shape_of(parse_config(published[preset]), preset)
    there_is = f"there is {', '.join(published)}, and directories with a config.json"
    raise ExperimentError([f"--model {name}: {there_is}{suggest_name(name, published)}"])
