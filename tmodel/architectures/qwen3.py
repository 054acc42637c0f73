"""Qwen3: pre-norm decoder, grouped-query attention with a norm on each query and key head, rotary positions, SwiGLU.

Source: Qwen3 Technical Report, 2025, section 2; tensor names as in transformers' `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tkernels import KernelSet
from tkernels.ranges import Range
from tmodel.architectures import Architecture
from tmodel.batch import Batch
from tmodel.config import ConfigError, HuggingFaceConfig, ModelConfig
from tmodel.kv_cache import KVCache
from tmodel.layers import GateUp, JoinedLinear, Linear, PagedAttention, SplitGateUp, bytes_of
from tmodel.linear_reader import LinearReader
from tmodel.quantization import LinearShape
from tmodel.rotary import rotary_tables
from tmodel.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights. Hq query heads and Hkv key-value heads of D dims, hidden size H, MLP width I."""

    range: Range
    attention_norm: torch.Tensor  # [H]
    qkv: Linear | JoinedLinear  # H -> (Hq + 2 Hkv) D
    q_norm: torch.Tensor  # [D]
    k_norm: torch.Tensor  # [D]
    output: Linear | JoinedLinear  # Hq D -> H
    mlp_norm: torch.Tensor  # [H]
    gate_up: GateUp | SplitGateUp  # H -> I
    down: Linear | JoinedLinear  # I -> H
    window: int | None


class Qwen3:
    """Packed tokens in, logits out; weights and kernels are given and never change."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, kernels: KernelSet) -> None:
        self.config = config
        self.kernels = kernels
        self.scale = config.head_dim**-0.5
        vocab_shape = (config.vocab_size, config.hidden_size)
        self.embedding = checkpoint.tensor("model.embed_tokens.weight", vocab_shape)
        self._embed = kernels.ranges.named("embedding", "part")
        reader = LinearReader(checkpoint, kernels, config.quantization)
        self.layers = [_layer(config, checkpoint, reader, index) for index in range(config.num_layers)]
        self.final_norm = checkpoint.tensor("model.norm.weight", (config.hidden_size,))
        # A layer's second add_rms_norm is also the next layer's first norm, so it takes that layer's weight.
        self.next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        if config.tie_word_embeddings:
            checkpoint.require_equal("lm_head.weight", self.embedding)
            self.head: Linear | JoinedLinear = Linear(
                kernels.ranges.named("lm_head", "part"), kernels.matmul, self.embedding
            )
        else:
            self.head = reader.linear(_head_shape(config))
        self.prepare_report = reader.report
        table_dtype = torch.float64 if checkpoint.dtype == torch.float64 else torch.float32
        self.cos, self.sin = rotary_tables(
            config.rotary_dim, config.rope_theta, config.max_position_embeddings,
            dtype=table_dtype, device=checkpoint.device,
        )  # fmt: skip

    @property
    def weight_bytes(self) -> int:
        return bytes_of([self.embedding, self.layers, self.final_norm, self.head])

    @torch.inference_mode()
    def __call__(self, batch: Batch, kv_cache: KVCache) -> torch.Tensor:
        """Logits [n, vocab] at `batch.logit_indices`, float32 or float64; writes this step into `kv_cache`."""
        kernels, eps = self.kernels, self.config.norm_eps
        attention = PagedAttention(kernels, batch, self.scale)
        with self._embed:
            residual = self.embedding.index_select(0, batch.token_ids)  # [T, H]
        hidden = kernels.rms_norm(residual, self.layers[0].attention_norm, eps)  # [T, H]
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, self.next_norms, kv_cache, strict=True):
            with layer.range:
                mixed = self._attend(layer, hidden, batch, attention, k_cache, v_cache)  # [T, Hq D]
                if layer is self.layers[-1] and batch.logit_indices.shape != batch.positions.shape:
                    # Past the last attention no token looks at another, so only the wanted ones go on: [n, Hq D],
                    # [n, H]. Where all T are wanted they go on as they are, for logit_indices ascend.
                    mixed, residual = mixed[batch.logit_indices], residual[batch.logit_indices]
                hidden, residual = kernels.add_rms_norm(layer.output(mixed), residual, layer.mlp_norm, eps)
                mlp = layer.down(layer.gate_up(hidden))  # [T, H] -> [T, I] -> [T, H]
                hidden, residual = kernels.add_rms_norm(mlp, residual, next_norm, eps)
        logits = self.head(hidden)  # [n, vocab]
        return logits if logits.dtype == torch.float64 else logits.float()

    def _attend(
        self, layer: Layer, hidden: torch.Tensor, batch: Batch, attention: PagedAttention,
        k_cache: torch.Tensor, v_cache: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """hidden [T, H] -> the heads' outputs side by side [T, Hq D]; writes the caches."""
        config, kernels = self.config, self.kernels
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = layer.qkv(hidden).view(-1, sum(heads), config.head_dim).split(heads, dim=1)  # views [T, heads, D]
        kernels.qk_norm_rope_scatter(
            q, k, v, self.cos, self.sin, batch.positions, k_cache, v_cache, batch.slots,
            q_weight=layer.q_norm, k_weight=layer.k_norm, eps=config.norm_eps,
        )  # fmt: skip
        return attention(q, k_cache, v_cache, layer.window).flatten(1)


def linears(config: ModelConfig) -> list[LinearShape]:
    """Every linear layer that the checkpoint may hold quantized."""
    shapes = [shape for index in range(config.num_layers) for shape in _layer_shapes(config, index)]
    return shapes if config.tie_word_embeddings else [*shapes, _head_shape(config)]


def _layer_shapes(config: ModelConfig, index: int) -> tuple[LinearShape, LinearShape, LinearShape, LinearShape]:
    """(qkv, output, gate_up, down) of a layer."""
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
    hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.attention_bias
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
    return (
        LinearShape(qkv, (q_width, kv_width, kv_width), hidden, bias),
        LinearShape((f"{attention}.o_proj",), (hidden,), q_width, bias),
        LinearShape((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (intermediate, intermediate), hidden, gated=True),
        LinearShape((f"{mlp}.down_proj",), (hidden,), intermediate),
    )


def _head_shape(config: ModelConfig) -> LinearShape:
    return LinearShape(("lm_head",), (config.vocab_size,), config.hidden_size)


def _layer(config: ModelConfig, checkpoint: Checkpoint, reader: LinearReader, index: int) -> Layer:
    qkv, output, gate_up, down = _layer_shapes(config, index)

    def norm(name: str, width: int) -> torch.Tensor:
        return checkpoint.tensor(f"model.layers.{index}.{name}.weight", (width,))

    return Layer(
        range=reader.kernels.ranges.named(f"layer {index}", "layer"),
        attention_norm=norm("input_layernorm", config.hidden_size),
        qkv=reader.linear(qkv),
        q_norm=norm("self_attn.q_norm", config.head_dim),
        k_norm=norm("self_attn.k_norm", config.head_dim),
        output=reader.linear(output),
        mlp_norm=norm("post_attention_layernorm", config.hidden_size),
        gate_up=reader.gate_up(gate_up),
        down=reader.linear(down),
        window=config.windows[index],
    )


def resolve(raw: HuggingFaceConfig, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The file's fields as a ModelConfig; ConfigError names one that transformers would compute otherwise."""
    num_kv_heads = raw.num_key_value_heads or raw.num_attention_heads
    if raw.num_attention_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={raw.num_attention_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
        )
    if raw.hidden_act != "silu":
        raise ConfigError(f"hidden_act is {raw.hidden_act!r}; Qwen3 is supported with 'silu'")
    if raw.rope_kind != "default":
        raise ConfigError(f"rope scaling of type {raw.rope_kind!r} is not supported; only 'default' (none) is")
    if raw.rotary_factor != 1.0:
        raise ConfigError(
            f"partial_rotary_factor is {raw.rotary_factor}; "
            "Qwen3 rotates every dim of a head, and transformers ignores the field"
        )
    head_dim = raw.head_dim or 128  # transformers' default for Qwen3, whatever the hidden size
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary positions need it even")
    return ModelConfig(
        architecture=ARCHITECTURE.name,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope_theta=raw.resolved_rope_theta(),
        norm_eps=raw.rms_norm_eps,
        max_position_embeddings=raw.max_position_embeddings,
        attention_bias=raw.attention_bias,
        tie_word_embeddings=raw.tie_word_embeddings,
        windows=raw.resolved_windows(),
        eos_token_ids=eos_token_ids,
        dtype=raw.resolved_dtype(),
    )


ARCHITECTURE = Architecture(name="Qwen3ForCausalLM", resolve=resolve, build=Qwen3, linears=linears)
