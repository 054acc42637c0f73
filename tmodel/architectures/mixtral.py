"""Mixtral: a Mistral whose layers have experts in place of one MLP.

Source: Jiang et al., Mixtral of Experts, 2024, section 2; fields and tensor names as in transformers'
`MixtralForCausalLM`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.experts import Experts
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, ExpertsConfig, LayerType, divide_heads, equal_windows


class MixtralConfig(ExpertsConfig):
    """What an absent field means is what it means to transformers' `MixtralConfig`; sizes must be given."""

    default_rope_theta: ClassVar[float] = 1000000.0

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = 8
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: Epsilon = 1e-5
    sliding_window: PositiveInt | None = None
    layer_types: list[LayerType] | None = None
    num_experts_per_tok: PositiveInt = 2
    eos_token_id: int | list[int] | None = 2


def decoder(fields: MixtralConfig) -> PreNormDecoder:
    """Mixtral of these sizes; ConfigError names a field that transformers would compute otherwise."""
    head_dim = fields.head_dim or divide_heads(fields.hidden_size, fields.num_attention_heads)
    equal_windows(fields.layer_types, fields.sliding_window, fields.num_hidden_layers)
    attention = GroupedQueryAttention(
        fields.hidden_size,
        fields.num_attention_heads,
        fields.num_key_value_heads or fields.num_attention_heads,
        head_dim,
        fields.whole_head_rope(head_dim),
        fields.sliding_window,
    )
    experts = Experts(
        fields.hidden_size,
        fields.intermediate_size,
        fields.num_experts,
        fields.num_experts_per_tok,
        normalize=True,
        rounded=False,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    )
    return PreNormDecoder(
        layers=(DecoderLayer(attention, experts),) * fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("MixtralForCausalLM", MixtralConfig, decoder)
