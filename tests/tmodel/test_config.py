"""config.json: both spellings of a field mean the same, and nothing that would be computed wrongly is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.tmodel.conftest import WriteCheckpoint
from tmodel import ConfigError, ModelConfig, load_config
from tmodel.architectures.qwen3 import Qwen3Config


def qwen3_fields(config: ModelConfig) -> Qwen3Config:
    assert isinstance(config.fields, Qwen3Config)
    return config.fields


def test_fields_are_read(write_checkpoint: WriteCheckpoint) -> None:
    config = load_config(write_checkpoint(rms_norm_eps=1e-5, attention_bias=True, torch_dtype="bfloat16"))
    fields = qwen3_fields(config)
    assert (config.architecture.name, config.vocab_size, fields.hidden_size) == ("Qwen3ForCausalLM", 40, 16)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (fields.rms_norm_eps, config.max_position_embeddings) == (1e-5, 64)
    assert (fields.attention_bias, fields.tie_word_embeddings, config.windows) == (True, False, (None, None))
    assert (config.eos_token_ids, config.dtype) == ((1,), torch.bfloat16)


def test_absent_fields_mean_what_transformers_defaults_to(write_checkpoint: WriteCheckpoint) -> None:
    absent = dict.fromkeys(("rope_theta", "torch_dtype", "num_key_value_heads", "eos_token_id", "head_dim"), ...)
    config = load_config(write_checkpoint({}, **absent, num_attention_heads=64))
    fields = qwen3_fields(config)
    assert (fields.resolved_rope_theta(), config.dtype, config.num_kv_heads) == (10000.0, torch.float32, 32)
    assert (config.eos_token_ids, config.head_dim, fields.rms_norm_eps) == ((), 128, 1e-6)
    assert load_config(write_checkpoint({}, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_every_spelling_of_the_rotary_base(write_checkpoint: WriteCheckpoint, spelling: dict[str, Any]) -> None:
    assert qwen3_fields(load_config(write_checkpoint(**spelling))).resolved_rope_theta() == 5e5


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 7}, (None, None)),
        ({"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7)),
        ({"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}, (7, None)),
    ],
)
def test_windows_per_layer(
    write_checkpoint: WriteCheckpoint, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_config(write_checkpoint(**fields)).windows == windows


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, r"unknown architecture 'Qwen3MoeForCausalLM'.*Qwen3ForCausalLM"),
        ({"architectures": ...}, "architectures must name exactly one"),
        ({"vocab_size": ...}, "vocab_size: Field required"),
        ({"hidden_size": "wide"}, "hidden_size: .*integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: .*greater than 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling of type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope scaling of type 'llama3'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope scaling of type 'default with factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "'default with full_attention'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: "),
        ({"hidden_size": True}, "hidden_size: .*integer"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"partial_rotary_factor is 0\.25"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is not given"),
        ({"torch_dtype": "int8"}, "dtype is 'int8'; supported are float64, float32, float16, bfloat16"),
        ({"eos_token_id": 40}, "eos_token_id 40 is not a token id below vocab_size=40"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method gptq: bits: Field required",
        ),
    ],
)
def test_refusals_name_file_and_field(write_checkpoint: WriteCheckpoint, fields: dict[str, Any], message: str) -> None:
    directory = write_checkpoint({}, **fields)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(directory)


def test_end_tokens_come_from_generation_config_first(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({})
    generation_file = directory / "generation_config.json"
    generation_file.write_text(json.dumps({"eos_token_id": [3, 2, 3]}))
    assert load_config(directory).eos_token_ids == (3, 2)
    generation_file.write_text(json.dumps({"temperature": 0.6}))
    assert load_config(directory).eos_token_ids == (1,)


def test_a_missing_or_damaged_file_is_named(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({})
    file = directory / "config.json"
    file.write_text('{"architectures": ')
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read as JSON"):
        load_config(directory)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: expected a JSON object, got list"):
        load_config(directory)
    file.unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_config(directory)
