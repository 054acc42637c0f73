"""Qwen3-MoE: a Qwen3 whose layers have experts in place of one MLP, all of them or some.

Source: Qwen3 Technical Report, 2025, section 2; fields and tensor names as in transformers' `Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.experts import Experts
from tmodel.decoders.gated_mlp import GatedMLP
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, ExpertsConfig, LayerType, divide_heads, equal_windows


class Qwen3MoeConfig(ExpertsConfig):
    """What an absent field means is what it means to transformers' `Qwen3MoeConfig`; sizes must be given."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt = 6144  # of layers without experts
    moe_intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 32768
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    layer_types: list[LayerType] | None = None
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[int] | None = None

    def has_experts(self, index: int) -> bool:
        """Whether layer `index` has; else it has one MLP."""
        return index not in (self.mlp_only_layers or ()) and (index + 1) % self.decoder_sparse_step == 0


def decoder(fields: Qwen3MoeConfig) -> PreNormDecoder:
    """Qwen3-MoE of these sizes; ConfigError names a field that transformers would compute otherwise."""
    head_dim = fields.head_dim or divide_heads(fields.hidden_size, fields.num_attention_heads)
    window = fields.sliding_window if fields.use_sliding_window else None
    equal_windows(fields.layer_types, window, fields.num_hidden_layers)
    attention = GroupedQueryAttention(
        fields.hidden_size,
        fields.num_attention_heads,
        fields.num_key_value_heads,
        head_dim,
        fields.whole_head_rope(head_dim),
        window,
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        head_norm_eps=fields.rms_norm_eps,
    )
    mlp = GatedMLP(fields.hidden_size, fields.intermediate_size)
    experts = Experts(
        fields.hidden_size,
        fields.moe_intermediate_size,
        fields.num_experts,
        fields.num_experts_per_tok,
        normalize=fields.norm_topk_prob,
        rounded=True,
    )
    layers = range(fields.num_hidden_layers)
    return PreNormDecoder(
        layers=tuple(DecoderLayer(attention, experts if fields.has_experts(index) else mlp) for index in layers),
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("Qwen3MoeForCausalLM", Qwen3MoeConfig, decoder)
