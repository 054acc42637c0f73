"""gpt-oss: experts in every layer, attention with sinks, and windows in every other layer.

Source: OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, 2025, section 2; fields and tensor names as in transformers'
`GptOssForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from tkernels.ops.activations import CLAMPED_GATE
from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.decoders.experts import Experts
from tmodel.decoders.pre_norm import DecoderLayer, PreNormDecoder, pre_norm_architecture
from tmodel.fields import Epsilon, ExpertsConfig, LayerType, windows_of
from tmodel.json_files import ConfigError


class GptOssConfig(ExpertsConfig):
    """What an absent field means is what it means to transformers' `GptOssConfig`; sizes must be given."""

    default_rope_theta: ClassVar[float] = 150000.0
    default_rope: ClassVar[Mapping[str, Any]] = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt = 8
    head_dim: PositiveInt = 64
    hidden_act: Literal["silu"] = "silu"
    max_position_embeddings: PositiveInt = 131072
    rms_norm_eps: Epsilon = 1e-5
    attention_bias: bool = True
    sliding_window: PositiveInt | None = 128
    layer_types: list[LayerType] | None = None
    num_experts_per_tok: PositiveInt = 4
    swiglu_alpha: float = CLAMPED_GATE
    swiglu_limit: float = Field(default=7.0, ge=2.0**-10, le=1e6)

    def windows(self) -> tuple[int | None, ...]:
        """Of each layer; None is all keys before a query."""
        turns: tuple[LayerType, LayerType] = ("sliding_attention", "full_attention")
        types = self.layer_types or [turns[index % 2] for index in range(self.num_hidden_layers)]
        return windows_of(types, self.sliding_window, self.num_hidden_layers)


def decoder(fields: GptOssConfig) -> PreNormDecoder:
    """gpt-oss of these sizes; ConfigError names a field that transformers would compute otherwise."""
    if fields.swiglu_alpha != CLAMPED_GATE:
        raise ConfigError(f"swiglu_alpha is {fields.swiglu_alpha}; gates are multiplied by {CLAMPED_GATE} here")
    experts = Experts(
        fields.hidden_size,
        fields.intermediate_size,
        fields.num_experts,
        fields.num_experts_per_tok,
        normalize=True,
        rounded=True,
        router="router",
        projections=("gate_up_proj", "down_proj"),
        bias=True,
        limit=fields.swiglu_limit,
    )

    def attention(window: int | None) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            fields.hidden_size,
            fields.num_attention_heads,
            fields.num_key_value_heads,
            fields.head_dim,
            fields.whole_head_rope(fields.head_dim),
            window,
            qkv_bias=fields.attention_bias,
            output_bias=fields.attention_bias,
            sinks=True,
        )

    return PreNormDecoder(
        layers=tuple(DecoderLayer(attention(window), experts) for window in fields.windows()),
        hidden_size=fields.hidden_size,
        norm_eps=fields.rms_norm_eps,
        vocab_size=fields.vocab_size,
        tied_head=fields.tie_word_embeddings,
        max_position_embeddings=fields.max_position_embeddings,
    )


ARCHITECTURE = pre_norm_architecture("GptOssForCausalLM", GptOssConfig, decoder)
