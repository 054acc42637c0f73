"""Llama, and the many models of its shape: pre-norm decoder, grouped-query attention, rotary positions, SwiGLU.

Source: Touvron et al., LLaMA, 2023, section 2.2; fields and tensor names as in transformers' `LlamaForCausalLM`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.gated_mlp import GatedMLP
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, RotaryConfig, divide_heads


class LlamaConfig(RotaryConfig):
    """What an absent field means is what it means to transformers' `LlamaConfig`; sizes must be given."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 2048
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = 2


def decoder(fields: LlamaConfig) -> PreNormDecoder:
    """Llama of these sizes; ConfigError names a field that transformers would compute otherwise."""
    head_dim = fields.head_dim or divide_heads(fields.hidden_size, fields.num_attention_heads)
    attention = GroupedQueryAttention(
        fields.hidden_size,
        fields.num_attention_heads,
        fields.num_key_value_heads or fields.num_attention_heads,
        head_dim,
        fields.whole_head_rope(head_dim),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
    )
    mlp = GatedMLP(fields.hidden_size, fields.intermediate_size, fields.mlp_bias)
    return PreNormDecoder(
        layers=(DecoderLayer(attention, mlp),) * fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("LlamaForCausalLM", LlamaConfig, decoder)
