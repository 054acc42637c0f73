"""A field that config.json leaves out means what it means to transformers, in every architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tmodel.conftest import WriteCheckpoint
from tmodel import ConfigError, known_architectures, load_config
from tmodel.architectures.gpt2 import GPT2Config
from tmodel.architectures.gpt_oss import GptOssConfig
from tmodel.architectures.llama import LlamaConfig
from tmodel.architectures.mistral import MistralConfig
from tmodel.architectures.mixtral import MixtralConfig
from tmodel.architectures.olmoe import OlmoeConfig
from tmodel.architectures.qwen2 import Qwen2Config
from tmodel.architectures.qwen3 import Qwen3Config
from tmodel.architectures.qwen3_moe import Qwen3MoeConfig
from tmodel.decoders.attention import GroupedQueryAttention
from tmodel.fields import HuggingFaceConfig, RotaryConfig
from tmodel.quantization import Feed
from tmodel.rotary import ROPE_KINDS, Rope, RopeParameters

CONFIGS = (
    GPT2Config, GptOssConfig, LlamaConfig, MistralConfig, MixtralConfig, OlmoeConfig, Qwen2Config, Qwen3Config,
    Qwen3MoeConfig,
)  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}


def load_gpt2(directory: Path, **fields: Any) -> Any:
    """GPT2 with no other fields than these, without an end token."""
    (directory / "config.json").write_text(json.dumps({**GPT2, "eos_token_id": 0, **fields}))
    return load_config(directory)


@pytest.mark.parametrize("ours", CONFIGS)
def test_every_default_is_that_of_transformers(ours: type[HuggingFaceConfig]) -> None:
    import transformers

    assert {one.fields for one in known_architectures().values()} == set(CONFIGS)
    theirs = getattr(transformers, ours.__name__)
    defaults = {name: field.get_default() for name, field in ours.model_fields.items() if not field.is_required()}
    assert {"tie_word_embeddings", "eos_token_id"} < set(defaults)
    for name, value in defaults.items():
        assert value == getattr(theirs, name, None), name
    if issubclass(ours, RotaryConfig):
        sizes = {name: 64 for name, field in ours.model_fields.items() if field.is_required()}
        rope = ours.model_validate({**sizes, "rope_parameters": None}).rope_parameters  # type: ignore[attr-defined]
        kinds = {kind: name for name, kind in ROPE_KINDS.items()}
        given = {"rope_type": kinds[type(rope)], **rope.model_dump(exclude_unset=True)}
        assert given == theirs().rope_parameters


def test_a_gpt2_of_sizes_alone_is_a_decoder_with_scaled_scores(tmp_path: Path) -> None:
    config = load_gpt2(tmp_path)
    assert [config.fields.scale(index) for index in (0, 1)] == [0.25, 0.25]
    assert (config.max_position_embeddings, config.windows) == (1024, (None, None))
    assert (config.eos_token_ids, config.dtype) == ((0,), torch.float32)  # 0 is a token as any other
    assert config.tensors()["transformer.h.0.mlp.c_fc.weight"] == (64, 256)
    assert "lm_head.weight" not in config.tensors()


def test_a_gpt2_that_reads_another_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="add_cross_attention is true; GPT-2 is supported as a decoder alone, where"):
        load_gpt2(tmp_path, add_cross_attention=True)


def test_a_head_of_qwen3_has_128_dims_where_none_are_named(write_checkpoint: WriteCheckpoint) -> None:
    for absent in (..., None):
        assert load_config(write_checkpoint({}, head_dim=absent)).head_dim == 128


def test_projections_have_a_bias_where_an_architecture_says_so() -> None:
    attention = GroupedQueryAttention(64, 4, 2, 16, Rope(16, RopeParameters(rope_theta=1e4)))
    qkv, output = attention.linears("a", Feed("norm"))
    assert (qkv.bias, output.bias, attention.norms("a")) == (False, False, {})
