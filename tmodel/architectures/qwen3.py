"""Qwen3: pre-norm decoder, grouped-query attention with a norm on each query and key head, rotary positions, SwiGLU.

Source: Qwen3 Technical Report, 2025, section 2; fields and tensor names as in transformers' `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.gated_mlp import GatedMLP
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import LayerType, RotaryConfig, windows_of
from tmodel.json_files import ConfigError
from tmodel.rotary import Rope


class Qwen3Config(RotaryConfig):
    """What an absent field means is what it means to transformers' `Qwen3Config`; sizes must be given."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt | None = 128  # whatever the hidden size
    hidden_act: str = "silu"
    max_position_embeddings: PositiveInt = 32768
    rms_norm_eps: PositiveFloat = 1e-6
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28
    layer_types: list[LayerType] | None = None

    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None is all keys before a query."""
        first = self.max_window_layers if self.use_sliding_window else self.num_hidden_layers
        layers = range(self.num_hidden_layers)
        by_place: list[LayerType] = ["sliding_attention" if i >= first else "full_attention" for i in layers]
        given = self.use_sliding_window or "sliding_window" in self.model_fields_set
        return windows_of(
            by_place if self.layer_types is None else self.layer_types,
            self.sliding_window if given else None,
            self.num_hidden_layers,
        )


def decoder(fields: Qwen3Config) -> PreNormDecoder:
    """Qwen3 of these sizes; ConfigError names a field that transformers would compute otherwise."""
    if fields.hidden_act != "silu":
        raise ConfigError(f"hidden_act is {fields.hidden_act!r}; Qwen3 is supported with 'silu'")
    if fields.rotary_factor not in (None, 1.0):
        raise ConfigError(
            f"partial_rotary_factor is {fields.rotary_factor}; "
            "Qwen3 rotates every dim of a head, and transformers ignores the field"
        )
    head_dim = fields.head_dim or 128
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary positions need it even")
    rope = Rope(head_dim, fields.resolved_rope_theta())
    mlp = GatedMLP(fields.hidden_size, fields.intermediate_size)

    def attention(window: int | None) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            fields.hidden_size,
            fields.num_attention_heads,
            fields.num_key_value_heads or fields.num_attention_heads,
            head_dim,
            rope,
            window,
            qkv_bias=fields.attention_bias,
            output_bias=fields.attention_bias,
            head_norm_eps=fields.rms_norm_eps,
        )

    return PreNormDecoder(
        layers=tuple(DecoderLayer(attention(window), mlp) for window in fields.windows()),
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("Qwen3ForCausalLM", Qwen3Config, decoder)
