"""OLMoE: pre-norm decoder of many small experts, with norms of all query heads at once and of all key heads.

Source: Muennighoff et al., OLMoE, 2024, section 2; fields and tensor names as in transformers' `OlmoeForCausalLM`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.experts import Experts
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, ExpertsConfig, divide_heads
from tmodel.json_files import ConfigError


class OlmoeConfig(ExpertsConfig):
    """What an absent field means is what it means to transformers' `OlmoeConfig`; sizes must be given."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 4096
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = False
    clip_qkv: float | None = None
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    eos_token_id: int | list[int] | None = 50279


def decoder(fields: OlmoeConfig) -> PreNormDecoder:
    """OLMoE of these sizes; ConfigError names a field that transformers would compute otherwise."""
    head_dim = divide_heads(fields.hidden_size, fields.num_attention_heads)
    if fields.head_dim not in (None, head_dim):
        raise ConfigError(
            f"head_dim is {fields.head_dim}; the norms of OLMoE's queries and keys are made for hidden_size / "
            f"num_attention_heads = {head_dim}, and transformers cannot run another"
        )
    if fields.clip_qkv is not None:
        raise ConfigError(f"clip_qkv is {fields.clip_qkv}; clipped queries, keys and values are not supported: null is")
    attention = GroupedQueryAttention(
        fields.hidden_size,
        fields.num_attention_heads,
        fields.num_key_value_heads or fields.num_attention_heads,
        head_dim,
        fields.whole_head_rope(head_dim),
        qkv_bias=fields.attention_bias,
        output_bias=fields.attention_bias,
        joint_norm_eps=fields.rms_norm_eps,
    )
    experts = Experts(
        fields.hidden_size,
        fields.intermediate_size,
        fields.num_experts,
        fields.num_experts_per_tok,
        normalize=fields.norm_topk_prob,
        rounded=True,
    )
    return PreNormDecoder(
        layers=(DecoderLayer(attention, experts),) * fields.num_hidden_layers,
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("OlmoeForCausalLM", OlmoeConfig, decoder)
