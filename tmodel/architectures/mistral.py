"""Mistral 7B and its successors: a Llama whose layers may all have one window, and whose heads have their own width.

Source: Jiang et al., Mistral 7B, 2023, section 2; fields and tensor names as in transformers' `MistralForCausalLM`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.gated_mlp import GatedMLP
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, LayerType, RotaryConfig, divide_heads, equal_windows


class MistralConfig(RotaryConfig):
    """What an absent field means is what it means to transformers' `MistralConfig`; sizes must be given."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: Epsilon = 1e-6
    sliding_window: PositiveInt | None = 4096  # absent is a window, null is none
    layer_types: list[LayerType] | None = None
    eos_token_id: int | list[int] | None = 2


def decoder(fields: MistralConfig) -> PreNormDecoder:
    """Mistral of these sizes; ConfigError names a field that transformers would compute otherwise."""
    equal_windows(fields.layer_types, fields.sliding_window, fields.num_hidden_layers)
    head_dim = fields.head_dim or divide_heads(fields.hidden_size, fields.num_attention_heads)
    attention = GroupedQueryAttention(
        fields.hidden_size,
        fields.num_attention_heads,
        fields.num_key_value_heads or fields.num_attention_heads,
        head_dim,
        fields.whole_head_rope(head_dim),
        fields.sliding_window,
    )
    mlp = GatedMLP(fields.hidden_size, fields.intermediate_size)
    return PreNormDecoder(
        layers=(DecoderLayer(attention, mlp),) * fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("MistralForCausalLM", MistralConfig, decoder)
