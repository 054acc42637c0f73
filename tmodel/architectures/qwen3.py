"""Qwen3: pre-norm decoder, grouped-query attention with a norm on each query and key head, rotary positions, SwiGLU.

Source: Qwen3 Technical Report, 2025, section 2; fields and tensor names as in transformers' `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.gated_mlp import GatedMLP
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, QwenWindows


class Qwen3Config(QwenWindows):
    """What an absent field means is what it means to transformers' `Qwen3Config`; sizes must be given."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = 32
    head_dim: PositiveInt | None = 128  # whatever the hidden size
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 32768
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: bool = False


def decoder(fields: Qwen3Config) -> PreNormDecoder:
    """Qwen3 of these sizes; ConfigError names a field that transformers would compute otherwise."""
    head_dim = fields.head_dim or 128
    rope = fields.whole_head_rope(head_dim)
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
