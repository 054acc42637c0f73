"""GPT-2: pre-norm decoder with layer norms, learned positions, multi-head attention and a GELU MLP, biases everywhere.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019; fields and tensor names as in
transformers' `GPT2LMHeadModel`. The weights of linear layers are stored [K, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from pydantic import PositiveInt

from tkernels import KernelSet
from tkernels.names import suggest_name
from tkernels.ranges import Range
from tmodel.batch import Batch, KVCache
from tmodel.config import Architecture, Axes, Limits, ModelConfig
from tmodel.fields import Epsilon, HuggingFaceConfig
from tmodel.json_files import ConfigError
from tmodel.kernel_axes import attention_axes, layer_norm_axes, linear_axes, scatter_axes
from tmodel.layers import JoinedLinear, Linear, MatmulGelu, PagedAttention, SplitGelu, count_weight_bytes
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape
from tmodel.weights import Checkpoint

_EMBEDDING, _POSITIONS, _FINAL_NORM = "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f"
_LAYERS = "transformer.h"
_BUFFERS = (".attn.bias", ".attn.masked_bias")
"""How the names of the masks end that checkpoints of 2022 and before carry."""

_GELUS: Mapping[str, Literal["erf", "tanh"]] = {
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu": "erf",
}
"""Activations by their names in transformers. Those by tanh differ in the order of their operations alone."""

Norm = tuple[torch.Tensor, torch.Tensor]
"""Weight and bias of a layer norm, [H] each."""


class GPT2Config(HuggingFaceConfig):
    """What an absent field means is what it means to transformers' `GPT2Config`; sizes must be given.

    `reorder_and_upcast_attn` says that scores are made in float32. They always are, so nothing here asks for it.
    """

    n_embd: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    n_inner: PositiveInt | None = None
    n_positions: PositiveInt = 1024
    layer_norm_epsilon: Epsilon = 1e-5
    activation_function: str = "gelu_new"
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: int | list[int] | None = 50256

    def scale(self, index: int) -> float:
        """What the scores of layer `index` are multiplied by."""
        scale = (self.n_embd // self.n_head) ** -0.5 if self.scale_attn_weights else 1.0
        return scale / (index + 1) if self.scale_attn_by_inverse_layer_idx else scale


def resolve(fields: GPT2Config, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """GPT-2 of these sizes; ConfigError names a field that transformers would compute otherwise, or not at all."""
    if fields.activation_function not in _GELUS:
        raise ConfigError(
            f"activation_function is {fields.activation_function!r}; GPT-2 is supported with "
            f"{', '.join(map(repr, _GELUS))}{suggest_name(fields.activation_function, _GELUS)}"
        )
    if fields.n_embd % fields.n_head:
        raise ConfigError(f"n_embd={fields.n_embd} is not a multiple of n_head={fields.n_head}")
    if fields.add_cross_attention:
        raise ConfigError("add_cross_attention is true; GPT-2 is supported as a decoder alone, where it is false")
    return ModelConfig(
        architecture=ARCHITECTURE,
        fields=fields,
        num_layers=fields.n_layer,
        num_heads=fields.n_head,
        num_kv_heads=fields.n_head,
        head_dim=fields.n_embd // fields.n_head,
        windows=(None,) * fields.n_layer,
        max_position_embeddings=fields.n_positions,
        eos_token_ids=eos_token_ids,
        dtype=fields.resolved_dtype(),
    )


def layer_linears(fields: GPT2Config, index: int) -> tuple[LinearShape, LinearShape, LinearShape, LinearShape]:
    """Of layer `index`: query, key and value in one, the attention's output, the MLP's up and down projections."""
    hidden, width = fields.n_embd, fields.n_inner or 4 * fields.n_embd
    attention, mlp = f"{_LAYERS}.{index}.attn", f"{_LAYERS}.{index}.mlp"
    attention_norm, mlp_norm = layer_norms(index)
    values = Feed(f"{attention}.c_attn", (range(2 * hidden, 3 * hidden),))
    linear = partial(LinearShape, bias=True, transposed=True)
    return (
        linear((f"{attention}.c_attn",), (3 * hidden,), hidden, fed_by=Feed(attention_norm)),
        linear((f"{attention}.c_proj",), (hidden,), hidden, fed_by=values),
        linear((f"{mlp}.c_fc",), (width,), hidden, fed_by=Feed(mlp_norm), gelu=_GELUS[fields.activation_function]),
        linear((f"{mlp}.c_proj",), (hidden,), width),
    )


def layer_norms(index: int) -> tuple[str, str]:
    """The names of a layer's norms, ahead of its attention and ahead of its MLP."""
    return f"{_LAYERS}.{index}.ln_1", f"{_LAYERS}.{index}.ln_2"


def head_shape(fields: GPT2Config) -> LinearShape:
    """The last projection."""
    return LinearShape(("lm_head",), (fields.vocab_size,), fields.n_embd)


def linears(config: ModelConfig) -> list[LinearShape]:
    """Every linear layer that a checkpoint may hold quantized."""
    fields = _fields(config)
    shapes = [shape for index in range(config.num_layers) for shape in layer_linears(fields, index)]
    return shapes if fields.tie_word_embeddings else [*shapes, head_shape(fields)]


def tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor: what is around the layers, then each layer's."""
    fields = _fields(config)
    hidden = (fields.n_embd,)
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (fields.vocab_size, *hidden), _POSITIONS: (fields.n_positions, *hidden),
        f"{_FINAL_NORM}.weight": hidden, f"{_FINAL_NORM}.bias": hidden,
    }  # fmt: skip
    if not fields.tie_word_embeddings:
        shapes |= head_shape(fields).tensors()
    for index in range(config.num_layers):
        shapes |= {f"{norm}.{part}": hidden for norm in layer_norms(index) for part in ("weight", "bias")}
        for linear in layer_linears(fields, index):
            shapes |= linear.tensors()
    return shapes


def axes(config: ModelConfig, limits: Limits) -> Axes:
    """The ops that the model calls."""
    fields = _fields(config)
    tied = [head_shape(fields)] if fields.tie_word_embeddings else []
    return {
        **linear_axes([*linears(config), *tied], config.quantization, limits),
        **layer_norm_axes(fields.n_embd, limits),
        **scatter_axes(config, limits),
        **attention_axes(config, limits),
    }


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer with its weights."""

    range: Range
    scale: float
    attention_norm: Norm
    qkv: Linear | JoinedLinear  # H -> 3 H
    output: Linear | JoinedLinear  # H -> H
    mlp_norm: Norm
    up: MatmulGelu | SplitGelu  # H -> I
    down: Linear | JoinedLinear  # I -> H


class GPT2Model:
    """GPT-2 with its weights: packed tokens in, logits out. Weights and kernels never change."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, kernels: KernelSet) -> None:
        self.config, self.kernels = config, kernels
        fields, shapes = _fields(config), tensors(config)
        self.norm_eps = fields.layer_norm_epsilon
        checkpoint.ignore(name for name in checkpoint.names if name.endswith(_BUFFERS))
        self.positions = checkpoint.tensor(_POSITIONS, shapes[_POSITIONS])
        reader = LinearReader(checkpoint, kernels, config.quantization)
        self.embedding, self.head = reader.embedding_and_head(
            _EMBEDDING, head_shape(fields), tied=fields.tie_word_embeddings
        )
        self._embed = kernels.ranges.named("embedding", "part")
        self.layers = [self._layer(fields, index, checkpoint, reader) for index in range(config.num_layers)]
        self.final_norm = _read_norm(_FINAL_NORM, checkpoint, fields)
        # A layer's second add_layer_norm is also the next layer's first norm, so it takes that layer's weights.
        self.next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        self.prepare_report = reader.report

    @staticmethod
    def _layer(fields: GPT2Config, index: int, checkpoint: Checkpoint, reader: LinearReader) -> LayerWeights:
        qkv, output, up, down = layer_linears(fields, index)
        attention_norm, mlp_norm = (_read_norm(name, checkpoint, fields) for name in layer_norms(index))
        return LayerWeights(
            range=reader.kernels.ranges.named(f"layer {index}", "layer"),
            scale=fields.scale(index),
            attention_norm=attention_norm,
            qkv=reader.linear(qkv),
            output=reader.linear(output),
            mlp_norm=mlp_norm,
            up=reader.gelu(up),
            down=reader.linear(down),
        )

    @property
    def weight_bytes(self) -> int:
        """Of all weights as they are kept, a tied head's none."""
        return count_weight_bytes([self.embedding, self.positions, self.layers, self.final_norm, self.head])

    @torch.inference_mode()
    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Logits [n, vocab] at `batch.logit_indices`, float32 or float64; writes this step into `kv_cache`."""
        return self.compute_logits(self.compute_hidden(batch, kv_cache))

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """The final hidden states [n, H] at `batch.logit_indices`; writes this step into `kv_cache`."""
        kernels, eps = self.kernels, self.norm_eps
        steps = {scale: PagedAttention(kernels, batch, scale) for scale in {layer.scale for layer in self.layers}}
        with self._embed:
            tokens = self.embedding.index_select(0, batch.token_ids)  # [T, H]
            residual = tokens + self.positions.index_select(0, batch.positions)  # [T, H]
        hidden = kernels.layer_norm(residual, *self.layers[0].attention_norm, eps)  # [T, H]
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, self.next_norms, kv_cache, strict=True):
            with layer.range:
                mixed = self._mix(layer, hidden, steps[layer.scale], k_cache, v_cache)  # [T, H]
                if layer is self.layers[-1] and batch.logit_indices.shape != batch.positions.shape:
                    # Past the last attention no token looks at another, so only the wanted ones go on: [n, H]. Where
                    # all T are wanted they go on as they are, for logit_indices ascend.
                    mixed, residual = mixed[batch.logit_indices], residual[batch.logit_indices]
                hidden, residual = kernels.add_layer_norm(layer.output(mixed), residual, *layer.mlp_norm, eps)
                hidden, residual = kernels.add_layer_norm(layer.down(layer.up(hidden)), residual, *next_norm, eps)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of final hidden states [n, H], float32 or float64."""
        logits = self.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _mix(
        self, layer: LayerWeights, hidden: torch.Tensor, step: PagedAttention, k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """hidden [T, H] -> what the heads take from the tokens before, side by side: [T, H]; writes the caches."""
        heads, dim = self.config.num_heads, self.config.head_dim
        q, k, v = layer.qkv(hidden).view(-1, 3 * heads, dim).split(heads, dim=1)  # views [T, heads, D]
        self.kernels.kv_scatter(k, v, k_cache, v_cache, step.slots)
        return step(q, k_cache, v_cache, None).flatten(1)


def _fields(config: ModelConfig) -> GPT2Config:
    assert isinstance(config.fields, GPT2Config), "they were read as the architecture says"
    return config.fields


def _read_norm(name: str, checkpoint: Checkpoint, fields: GPT2Config) -> Norm:
    return checkpoint.tensor(f"{name}.weight", (fields.n_embd,)), checkpoint.tensor(f"{name}.bias", (fields.n_embd,))


ARCHITECTURE = Architecture(
    "GPT2LMHeadModel", GPT2Config, resolve, tensors, axes, GPT2Model, linears=linears, layers=_LAYERS
)
