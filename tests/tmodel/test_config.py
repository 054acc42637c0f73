"""config.json: both spellings of a field mean the same, and nothing that would be computed wrongly is accepted."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from tests.tmodel.conftest import WriteCheckpoint
from tmodel import ConfigError, ModelConfig, known_architectures, load_config
from tmodel.architectures.qwen3 import Qwen3Config
from tmodel.fields import RotaryConfig
from tmodel.rotary import ROPE_KINDS


def known_rotary_architectures() -> list[str]:
    return [name for name, one in known_architectures().items() if issubclass(one.fields, RotaryConfig)]


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
    assert (fields.rope_parameters.rope_theta, config.dtype, config.num_kv_heads) == (10000.0, torch.float32, 32)
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
    assert qwen3_fields(load_config(write_checkpoint(**spelling))).rope_parameters.rope_theta == 5e5


# What a config of a mixture of experts has beside; with 64 hidden, heads of 16 dims need not be named.
MIXTURE = {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2] * 8}
LLAMA3 = {"factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


YARN = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}


def spelled(kind: str, name: str, value: Any) -> dict[str, Any]:
    """A config's rotary parameters of a kind, one of them of another value."""
    parameters = {"linear": {"factor": 2.0}, "llama3": LLAMA3, "yarn": YARN, "longrope": LISTS}[kind]
    return {"rope_scaling": {"type": kind, **parameters, name: value}}


@pytest.mark.parametrize("architecture", known_rotary_architectures())
@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("default", {}),
        ("linear", {"factor": 2.0}),
        ("llama3", LLAMA3),
        ("yarn", {"factor": 4, "original_max_position_embeddings": 32, "truncate": False}),
        ("longrope", {**LISTS, "original_max_position_embeddings": 16}),
    ],
)
def test_old_and_new_spelling_give_equal_configs(
    architecture: str, kind: str, parameters: dict[str, Any], write_checkpoint: WriteCheckpoint
) -> None:
    file: dict[str, Any] = {**MIXTURE, "architectures": [architecture], "rope_theta": ..., "torch_dtype": ...}
    new = {"rope_type": kind, "rope_theta": 5e5, **parameters}
    config = load_config(write_checkpoint({}, **file, dtype="float16", rope_parameters=new))
    rope = config.fields.rope_parameters  # type: ignore[attr-defined]
    assert isinstance(rope, ROPE_KINDS[kind])
    assert {name: getattr(rope, name) for name in ("rope_theta", *parameters)} == {"rope_theta": 5e5, **parameters}
    old: dict[str, Any] = {**file, "torch_dtype": "float16", "rope_theta": 5e5}
    for spelling in (
        {"rope_scaling": {"type": kind, **parameters}},
        {"rope_scaling": {"rope_type": kind, "type": kind, **parameters, "attention_factor": None}},
        {"rope_scaling": {"type": kind, **parameters}, "rope_parameters": None},
    ):
        assert load_config(write_checkpoint({}, **{**old, **spelling})) == config
    if "original_max_position_embeddings" in parameters:  # as Phi-3 has it
        beside = dict(parameters)
        length = beside.pop("original_max_position_embeddings")
        spelling = {"rope_scaling": {"type": kind, **beside}, "original_max_position_embeddings": length}
        assert load_config(write_checkpoint({}, **{**old, **spelling})) == config


MISTRAL, QWEN2 = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7}


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 7}, (None, None)),
        ({**WINDOWED, "max_window_layers": 1}, (None, 7)),
        ({**WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}, (7, None)),
        (MISTRAL, (4096, 4096)),
        ({**MISTRAL, "sliding_window": 7}, (7, 7)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "sliding_window": 7, "layer_types": ["sliding_attention"] * 2}, (7, 7)),
        ({**QWEN2, "sliding_window": 7}, (None, None)),
        ({**QWEN2, **WINDOWED, "max_window_layers": 1}, (None, 7)),
        ({**QWEN2, "sliding_window": 7, "layer_types": ["full_attention"] * 2}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 7}, (None, None)),  # transformers ignores it too
    ],
)
def test_windows_per_layer(
    write_checkpoint: WriteCheckpoint, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_config(write_checkpoint({}, **fields)).windows == windows


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("layer_types", [..., ["full_attention"] * 2, ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("use", [..., False, True])
@pytest.mark.parametrize("window", [..., None, 7])
def test_windows_are_those_of_transformers(
    write_checkpoint: WriteCheckpoint, architecture: str, layer_types: Any, use: Any, window: Any
) -> None:
    fields = {"layer_types": layer_types, "use_sliding_window": use, "sliding_window": window, "max_window_layers": 1}
    directory = write_checkpoint({}, architectures=[architecture], **fields)
    import transformers

    theirs = getattr(transformers, architecture).config_class.from_pretrained(directory)
    if theirs.sliding_window is None and "sliding_attention" in theirs.layer_types:  # its attention needs a number
        with pytest.raises(ConfigError, match="layer_types names sliding_attention, but"):
            load_config(directory)
    else:
        expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert list(load_config(directory).windows) == expected


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
def test_heads_share_the_hidden_size_where_no_head_dim_is_given(
    architecture: str, write_checkpoint: WriteCheckpoint
) -> None:
    for absent in (..., None):
        config = load_config(write_checkpoint({}, architectures=[architecture], head_dim=absent))
        assert (config.head_dim, config.num_heads, config.num_kv_heads) == (4, 4, 2)
    directory = write_checkpoint({}, architectures=[architecture], head_dim=None, hidden_size=18)
    with pytest.raises(ConfigError, match="hidden_size=18 is not a multiple of num_attention_heads=4, and head_dim"):
        load_config(directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, r"unknown architecture 'Qwen2MoeForCausalLM'.*Qwen3ForCausalLM"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "unknown architecture 'DeepseekV3ForCausalLM'"),
        ({"architectures": ...}, "architectures must name exactly one"),
        ({"vocab_size": ...}, "vocab_size: Field required"),
        ({"hidden_size": "wide"}, "hidden_size: .*integer, got 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: .*greater than 0, got 0"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "gelu"}, "hidden_act: Input should be 'silu', got 'gelu'"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_act": "relu2"}, "hidden_act: .*'silu', got 'relu2'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_scaling: rope_type 'dynamic' is not supported; supported are default, linear, llama3, yarn, longrope",
        ),
        ({"rope_parameters": {"type": "proportional"}}, "rope_parameters: rope_type 'proportional' is not supported"),
        ({"rope_parameters": {"type": ["linear"]}}, r"rope_type \['linear'\] is not supported"),
        ({"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "rope_type is 'default', but type is 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: Field required"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "rope_scaling.factor: .*greater than or equal to 0.001, got 0",
        ),
        *(
            (spelled(kind, name, value), rf"rope_scaling\.{name}.*, got {re.escape(repr(value))}")
            for kind, name in [
                ("linear", "factor"),
                ("llama3", "high_freq_factor"),
                ("yarn", "mscale"),
                ("yarn", "factor"),
            ]
            for value in (1e300, float("nan"), -1.0)
        ),
        (spelled("linear", "factor", 1e-300), "rope_scaling.factor: .*greater than or equal to 0.001, got 1e-300"),
        (spelled("longrope", "long_factor", [1e-300] * 8), r"rope_scaling.long_factor.0: .* 0.001, got 1e-300"),
        ({"rope_theta": 1e300}, "rope_theta: .*less than or equal to .*, got 1e\\+300"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps: .*less than or equal to 1, got 1e\\+300"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: .*greater than 0, got 0"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor: .*valid number, got '4'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.low_freq_factor: Field required"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}},
            "high_freq_factor=4.0 must be above low_freq_factor=4.0",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "factor": 4.0}},
            "rope_scaling: factor is no key of rope_type 'default', which has rope_theta, partial_rotary_factor",
        ),
        (
            {"rope_scaling": {"type": "yarn", "facter": 4.0}},
            "facter is no key of rope_type 'yarn', .*did you mean 'factor'",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "full_attention is no key of rope_type"),
        ({"rope_scaling": {"type": "longrope", **LISTS, "long_factor": [2.0]}}, "long_factor has 1 numbers, .* take 8"),
        ({"rope_scaling": 4}, "rope_scaling must be a mapping, got 4"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "rope_scaling and rope_parameters are both given, and differ",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3}, "original_max_position_embeddings": 64},
            "original_max_position_embeddings is 64, but 32 in rope_scaling",
        ),
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 1}},
            "rope_scaling.original_max_position_embeddings: Input should be greater than 1, got 1",
        ),
        ({"rope_theta": 0.5}, "rope_theta: Input should be greater than 1, got 0.5"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_parameters.rope_theta: .*valid number, got True"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: "),
        ({"hidden_size": True}, "hidden_size: .*integer"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, r"partial_rotary_factor is 0\.25"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({**QWEN2, "layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for num_hidden_layers=2"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types.0: .*'full_attention' or 'sliding_attention'"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
            "but use_sliding_window is false; one of them",
        ),
        (
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": None},
            "sliding_window is not given",
        ),
        ({"sliding_window": 0}, "sliding_window: .*greater than 0, got 0"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window: .*greater than 0, got 0"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 2}, "sliding_window=4096 the 2 layers are all sliding"),
        ({**MISTRAL, "layer_types": ["sliding_attention"]}, "sliding_window=4096 the 2 layers are all sliding"),
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
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}") as caught:
        load_config(directory)
    assert "Value error" not in str(caught.value), "it is said in words of our own"


@pytest.mark.parametrize("name", ["mscale", "mscale_all_dim"])
def test_a_scale_of_yarn_is_between_nothing_and_a_million(write_checkpoint: WriteCheckpoint, name: str) -> None:
    for value in (0, 0.707, 1e6):
        load_config(write_checkpoint({}, **spelled("yarn", name, value)))
    for value in (-0.001, 1_000_000.5):
        with pytest.raises(ConfigError, match=rf"rope_scaling\.{name}: .* equal to .*, got {value}"):
            load_config(write_checkpoint({}, **spelled("yarn", name, value)))


def test_end_tokens_come_from_generation_config_first(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({})
    generation_file = directory / "generation_config.json"
    generation_file.write_text(json.dumps({"eos_token_id": [3, 2, 3]}))
    assert load_config(directory).eos_token_ids == (3, 2)
    generation_file.write_text(json.dumps({"temperature": 0.6}))
    assert load_config(directory).eos_token_ids == (1,)
    generation_file.write_text("[]")
    with pytest.raises(ConfigError, match=rf"^{directory}/generation_config\.json: expected a JSON object"):
        load_config(directory)
    generation_file.write_text(json.dumps({"eos_token_id": 40}))
    with pytest.raises(ConfigError, match=rf"^{directory}/generation_config\.json: eos_token_id 40 is not a token id"):
        load_config(directory)


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
