"""The pre-norm decoder: x + attention(norm(x)), then x + mlp(norm(x)), layer after layer, between embedding and head.

Source: Xiong et al., On Layer Normalization in the Transformer Architecture, 2020, with the RMS norms of Touvron et
al., LLaMA, 2023. Tensors are named as transformers' classes of this structure name them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tkernels import KernelSet
from tkernels.ranges import Range
from tmodel.batch import Batch, KVCache
from tmodel.config import Architecture, Axes, Limits, ModelConfig
from tmodel.decoders.attention import AttentionLayer, GroupedQueryAttention
from tmodel.decoders.experts import Experts, ExpertsLayer
from tmodel.decoders.gated_mlp import GatedMLP, MLPLayer
from tmodel.fields import HuggingFaceConfig
from tmodel.json_files import ConfigError
from tmodel.kernel_axes import attention_axes, experts_axes, linear_axes, rms_norm_axes, rotary_axes
from tmodel.layers import PagedAttention, count_weight_bytes
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape
from tmodel.weights import Checkpoint

_EMBEDDING, _FINAL_NORM, _LAYERS = "model.embed_tokens.weight", "model.norm.weight", "model.layers"


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's parts; each has an RMS norm ahead of it."""

    attention: GroupedQueryAttention
    mlp: GatedMLP | Experts


@dataclass(frozen=True)
class PreNormDecoder:
    """The sizes of a pre-norm decoder.

    Attributes:
        layers: From the first to the last. All have the same heads; windows may differ.
        hidden_size: H, what a token is between layers.
        norm_eps: Of all norms but the heads'.
        vocab_size: Tokens that there are.
        tied_head: Whether the head's weight is the embedding's.
        max_position_embeddings: Tokens of the longest sequence.
    """

    layers: tuple[DecoderLayer, ...]
    hidden_size: int
    norm_eps: float
    vocab_size: int
    tied_head: bool
    max_position_embeddings: int

    def head(self) -> LinearShape:
        """The last projection."""
        return LinearShape(("lm_head",), (self.vocab_size,), self.hidden_size)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor: what is around the layers, then each layer's."""
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: (self.vocab_size, self.hidden_size), _FINAL_NORM: (self.hidden_size,),
        }  # fmt: skip
        if not self.tied_head:
            shapes |= self.head().tensors()
        for index, layer in enumerate(self.layers):
            shapes |= {f"{norm.name}.weight": (self.hidden_size,) for norm in _norms(index)}
            shapes |= layer.attention.beside_linears(_attention(index))
            for shape in [*layer.mlp.routers(self.mlp_name(index)), *self._linears_of(index)]:
                shapes |= shape.tensors()
        return shapes

    def linears(self) -> list[LinearShape]:
        """Every linear layer that a checkpoint may hold quantized."""
        shapes = [shape for index in range(len(self.layers)) for shape in self._linears_of(index)]
        return shapes if self.tied_head else [*shapes, self.head()]

    def _linears_of(self, index: int) -> list[LinearShape]:
        layer, (attention_norm, mlp_norm) = self.layers[index], _norms(index)
        attention = layer.attention.linears(_attention(index), attention_norm)
        return [*attention, *layer.mlp.linears(self.mlp_name(index), mlp_norm)]

    def mlp_name(self, index: int) -> str:
        """What the names of layer `index`'s MLP begin with."""
        return f"{_LAYERS}.{index}.{self.layers[index].mlp.block}"

    def axes(self, config: ModelConfig, limits: Limits) -> Axes:
        """The ops that the model calls."""
        attention = self.layers[0].attention
        routers = [
            shape for index, layer in enumerate(self.layers) for shape in layer.mlp.routers(self.mlp_name(index))
        ]
        linears = [*self.linears(), *routers, *([self.head()] if self.tied_head else [])]
        return {
            **linear_axes(linears, config.quantization, limits),
            **self._experts_axes(config, limits),
            **rms_norm_axes(self.hidden_size, limits, *attention.joint_norm_widths),
            **rotary_axes(config, limits, attention.rope.dim, head_norms=attention.head_norm_eps is not None),
            **attention_axes(config, limits, sinks=attention.sinks),
        }

    def _experts_axes(self, config: ModelConfig, limits: Limits) -> Axes:
        """What the layers with experts call; all of them have as many, and give a token as many."""
        mixtures = {index: layer.mlp for index, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts)}
        if not mixtures:
            return {}
        linears = [mlp.linears(self.mlp_name(index), _norms(index)[1]) for index, mlp in mixtures.items()]
        one = next(iter(mixtures.values()))
        return experts_axes(
            linears, config.quantization, limits, top_k=one.top_k, normalize=one.normalize, limit=one.limit
        )


def _norms(index: int) -> tuple[Feed, Feed]:
    """The norms of a layer, ahead of its attention and ahead of its MLP, and what they feed nothing else reads."""
    return Feed(f"{_LAYERS}.{index}.input_layernorm"), Feed(f"{_LAYERS}.{index}.post_attention_layernorm")


def _attention(index: int) -> str:
    return f"{_LAYERS}.{index}.self_attn"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer with its weights."""

    range: Range
    attention_norm: torch.Tensor  # [H]
    attention: AttentionLayer
    mlp_norm: torch.Tensor  # [H]
    mlp: MLPLayer | ExpertsLayer


class PreNormModel:
    """A pre-norm decoder with its weights: packed tokens in, logits out. Weights and kernels never change."""

    def __init__(
        self, decoder: PreNormDecoder, config: ModelConfig, checkpoint: Checkpoint, kernels: KernelSet
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.norm_eps = decoder.norm_eps
        attention = decoder.layers[0].attention
        self.scale = attention.head_dim**-0.5
        reader = LinearReader(checkpoint, kernels, config.quantization)
        self.embedding, self.head = reader.embedding_and_head(_EMBEDDING, decoder.head(), tied=decoder.tied_head)
        self._embed = kernels.ranges.named("embedding", "part")
        self.layers = [self._layer(decoder, index, checkpoint, reader) for index in range(len(decoder.layers))]
        self.final_norm = checkpoint.tensor(_FINAL_NORM, (decoder.hidden_size,))
        # A layer's second add_rms_norm is also the next layer's first norm, so it takes that layer's weight.
        self.next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        self.prepare_report = reader.report
        self.rotation = attention.rope.tables(
            decoder.max_position_embeddings,
            kernels.greatest("qk_norm_rope_scatter", "L"),
            dtype=checkpoint.dtype,
            device=checkpoint.device,
        )

    @staticmethod
    def _layer(decoder: PreNormDecoder, index: int, checkpoint: Checkpoint, reader: LinearReader) -> LayerWeights:
        layer, (attention_norm, mlp_norm) = decoder.layers[index], _norms(index)
        return LayerWeights(
            range=reader.kernels.ranges.named(f"layer {index}", "layer"),
            attention_norm=checkpoint.tensor(f"{attention_norm.name}.weight", (decoder.hidden_size,)),
            attention=layer.attention.build(_attention(index), attention_norm, checkpoint, reader),
            mlp_norm=checkpoint.tensor(f"{mlp_norm.name}.weight", (decoder.hidden_size,)),
            mlp=layer.mlp.build(decoder.mlp_name(index), mlp_norm, reader),
        )

    @property
    def weight_bytes(self) -> int:
        """Of all weights as they are kept, a tied head's none."""
        return count_weight_bytes([self.embedding, self.layers, self.final_norm, self.head])

    @torch.inference_mode()
    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Logits [n, vocab] at `batch.logit_indices`, float32 or float64; writes this step into `kv_cache`."""
        return self.compute_logits(self.compute_hidden(batch, kv_cache))

    @torch.inference_mode()
    def compute_hidden(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """The final hidden states [n, H] at `batch.logit_indices`; writes this step into `kv_cache`."""
        kernels, eps = self.kernels, self.norm_eps
        step = PagedAttention(kernels, batch, self.scale)
        with self._embed:
            residual = self.embedding.index_select(0, batch.token_ids)  # [T, H]
        hidden = kernels.rms_norm(residual, self.layers[0].attention_norm, eps)  # [T, H]
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, self.next_norms, kv_cache, strict=True):
            with layer.range:
                mixed = layer.attention.mix(hidden, step, self.rotation, k_cache, v_cache)  # [T, Hq D]
                if layer is self.layers[-1] and batch.logit_indices.shape != batch.positions.shape:
                    # Past the last attention no token looks at another, so only the wanted ones go on: [n, Hq D],
                    # [n, H]. Where all T are wanted they go on as they are, for logit_indices ascend.
                    mixed, residual = mixed[batch.logit_indices], residual[batch.logit_indices]
                hidden, residual = kernels.add_rms_norm(layer.attention.output(mixed), residual, layer.mlp_norm, eps)
                hidden, residual = kernels.add_rms_norm(layer.mlp(hidden), residual, next_norm, eps)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] of final hidden states [n, H], float32 or float64."""
        logits = self.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()


def pre_norm_architecture(
    name: str, fields: type[HuggingFaceConfig], describe: Callable[[Any], PreNormDecoder]
) -> Architecture:
    """The architecture of which `describe` gives the decoder from its config.json.

    Args:
        name: Transformers' class.
        fields: What its config.json has.
        describe: Fields -> decoder; ConfigError for what it would not compute as it was trained.
    """

    def resolve(raw: HuggingFaceConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
        decoder = describe(raw)
        attention = decoder.layers[0].attention
        if attention.num_heads % attention.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads={attention.num_heads} is not a multiple of "
                f"num_key_value_heads={attention.num_kv_heads}"
            )
        return ModelConfig(
            architecture=architecture,
            fields=raw,
            num_layers=len(decoder.layers),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            windows=tuple(layer.attention.window for layer in decoder.layers),
            max_position_embeddings=decoder.max_position_embeddings,
            eos_token_ids=eos_token_ids,
            dtype=raw.resolved_dtype(),
        )

    architecture = Architecture(
        name=name,
        fields=fields,
        resolve=resolve,
        tensors=lambda config: describe(config.fields).tensors(),
        axes=lambda config, limits: describe(config.fields).axes(config, limits),
        build=lambda config, *weights: PreNormModel(describe(config.fields), config, *weights),
        linears=lambda config: describe(config.fields).linears(),
        layers=_LAYERS,
    )
    return architecture
