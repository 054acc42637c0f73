"""What other tools write around the same tensors: auto-round's config, overrides of single layers, tied names, nulls.

Tensors are packed by hand; what is read must be their float64 decode bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.conftest import WriteCheckpoint
from tests.tmodel.formats.by_hand import Kind, as_torch, linear, settings
from tests.tmodel.formats.models import SHAPE, write_models
from tests.tmodel.formats.test_layouts import INPUTS, OUTPUTS, saved
from tests.tmodel.formats.test_models import network, served, tokens
from tkernels.quantized.weight import dequantize
from tmodel import ConfigError, WeightError, load_config
from tmodel.formats import AWQ, FP8, GPTQ, parse_format
from tmodel.model_names import find_model

GPTQ_4 = settings(Kind("gptq", 4, 32))
AWQ_4 = settings(Kind("awq", 4, 32))
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int", "iters": 200}

PACKINGS = [
    ({"packing_format": "auto_round:auto_gptq"}, "gptq"),
    ({"packing_format": "auto_round:gptq"}, "gptq"),
    ({}, "gptq"),
    ({"packing_format": None, "backend": "auto"}, "gptq"),
    ({"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"}, "gptq"),
    ({"packing_format": "auto_round:gptqmodel"}, "gptq_v2"),
    ({"packing_format": "auto_round"}, "gptq_v2"),
    ({"quant_method": "intel/auto-round", "backend": "auto_round:exllamav2"}, "gptq_v2"),
    ({"packing_format": "auto_round:auto_awq"}, "awq"),
    ({"packing_format": "auto_round:awq"}, "awq"),
]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("named", "method"), PACKINGS)
def test_a_layer_that_auto_round_packed(named: dict[str, Any], method: str, symmetric: bool, tmp_path: Path) -> None:
    kind = Kind(method, 4, 32, symmetric)
    parts, dense = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))
    parts.pop("g_idx", None)  # auto-round writes none
    quantization = parse_format({**AUTO_ROUND, "sym": symmetric, **named})
    with saved(tmp_path, as_torch(parts, "a.b.")) as checkpoint:
        weight = quantization.read(checkpoint, "a.b", OUTPUTS, INPUTS)
        checkpoint.refuse_unused()
    assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))
    assert weight.symmetric == symmetric
    assert quantization.scheme("lm_head") is None


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_auto_round_in_other_bits(bits: int, tmp_path: Path) -> None:
    parts, dense = linear(Kind("gptq", bits, -1), OUTPUTS, INPUTS, np.random.default_rng(0))
    del parts["g_idx"]
    quantization = parse_format({**AUTO_ROUND, "bits": bits, "group_size": -1})
    weight = quantization.read(saved(tmp_path, as_torch(parts, "a.b.")), "a.b", OUTPUTS, INPUTS)
    assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))


EXTRA = {
    ".*self_attn.*": {"bits": 8, "sym": True},
    "model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"},
    r"layers\.1\.mlp\.(gate|up)_proj": {"group_size": 128, "act_bits": None},
    "model.layers.1.self_attn.o_proj": {"bits": 2, "group_size": 64},
    "lm_head": {"bits": 8, "group_size": 32, "data_type": "int", "sym": False, "act_bits": 16},
}


def extra_kind(name: str) -> Kind | None:
    """What EXTRA says of a layer, in words of its own."""
    if name == "model.layers.0.mlp.down_proj":
        return None
    if name == "model.layers.1.self_attn.o_proj":
        return Kind("gptq", 2, 64)
    if "self_attn" in name:
        return Kind("gptq", 8, 32, symmetric=True)
    return Kind("gptq", 4, 128 if name.startswith("model.layers.1.mlp") and "down" not in name else 32)


def test_auto_round_s_settings_of_single_layers(tmp_path: Path) -> None:
    """A name wins over an expression, whatever their order; 16 bits are dense; the head counts where it is named."""
    extra = {name: overrides for name, overrides in EXTRA.items() if name != "lm_head"}
    quantized, dense = write_models(tmp_path, extra_kind, {**AUTO_ROUND, "extra_config": extra})
    assert tokens(served(quantized), 3) == tokens(served(dense), 3)
    found = parse_format({**AUTO_ROUND, "extra_config": EXTRA})
    scheme = found.scheme("lm_head")
    assert scheme is not None
    assert (scheme.bits, scheme.group_size) == (8, 32)
    assert parse_format({**AUTO_ROUND, "extra_config": {"lm_head": {"bits": 16}}}).scheme("lm_head") is None


@pytest.mark.parametrize(
    "blocks",
    [
        {"block_name_to_quantize": "model.layers.0,model.layers.1.mlp"},
        {"block_name_to_quantize": ["model.layers.0", "model.layers.1.mlp"]},
        {"quant_block_list": [["model.layers.0"], ["model.layers.1.mlp"]]},
    ],
)
def test_only_the_blocks_that_auto_round_names_are_quantized(blocks: dict[str, Any]) -> None:
    extra = {"lm_head": {"bits": 4}, "model.layers.1.self_attn.q_proj": {"bits": 8}}
    found = parse_format({**AUTO_ROUND, **blocks, "extra_config": extra})
    bits = {
        name: None if scheme is None else scheme.bits
        for name, scheme in ((name, found.scheme(name)) for name in (
            "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj",
            "model.layers.1.self_attn.k_proj", "lm_head",
        ))
    }  # fmt: skip
    assert list(bits.values()) == [4, 4, 8, None, 4]
    head = parse_format({**AUTO_ROUND, **blocks, "extra_config": {"lm_head": {}}}).scheme("lm_head")
    assert head == found.scheme("lm_head")  # it is named, and differs in nothing
    assert parse_format({**AUTO_ROUND, **blocks}).scheme("lm_head") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format.*'auto_round:llm_compressor' is not sup"),
        ({"packing_format": 4}, "packing_format.*4 is not supported; supported are auto_round:auto_gptq"),
        ({"data_type": "nv_fp"}, "data_type 'nv_fp': NVFP4, 4-bit floats .* `tk quantize` it"),
        ({"data_type": "mx_fp4"}, "data_type 'mx_fp4': MXFP4, 4-bit floats .* `tk quantize` it"),
        ({"data_type": "fp"}, "data_type 'fp' is not supported; 'int' is"),
        ({"act_bits": 8}, "act_bits 8: quantized activations are not supported here"),
        ({"bits": 5}, "bits: 5 bits; supported are 2, 3, 4, 8"),
        ({"group_size": 0}, "group_size 0; supported are -1"),
        ({"extra_config": {"a": {"bits": 5}}}, r"extra_config\['a'\]: bits: 5 bits; supported are 2, 3, 4, 8"),
        ({"extra_config": {"a": {"bits": "8"}}}, r"extra_config\['a'\]: bits: must be an integer, got '8'"),
        ({"extra_config": {"a": {"data_type": "fp"}}}, r"extra_config\['a'\]: data_type 'fp' is not supported"),
        ({"extra_config": {"a(": {"bits": 8}}}, r"'a\(': .*unterminated"),
        ({"packing_format": "auto_round:auto_awq", "extra_config": {"a": {"bits": 8}}}, r"\['a'\]: bits: 8 bits; .* 4"),
    ],
)
def test_an_auto_round_config_that_is_not_supported(
    write_checkpoint: WriteCheckpoint, changes: dict[str, Any], message: str
) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": {**AUTO_ROUND, **changes}})
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config: quant_method auto-round: .*{message}"):
        load_config(directory)


def test_awq_s_settings_of_single_layers(tmp_path: Path) -> None:
    def kind(name: str) -> Kind | None:
        if name.endswith("o_proj"):
            return None
        return Kind("awq", 4, 64 if name.endswith("down_proj") else 32)

    dynamic = {r"-:.*o_proj": {}, r"+:.*down_proj": {"group_size": 64, "sym": False, "adapter": None}}
    quantized, dense = write_models(tmp_path, kind, {**AWQ_4, "dynamic": dynamic, "adapter": None})
    assert tokens(served(quantized), 3) == tokens(served(dense), 3)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_head_that_is_quantized(method: str, tmp_path: Path) -> None:
    kind = Kind(method, 4, 32)
    quantized, dense = write_models(tmp_path, kind, {**settings(kind), "lm_head": True})
    parts, head = linear(kind, SHAPE["vocab_size"], SHAPE["hidden_size"], np.random.default_rng(5))
    for directory, added in ((quantized, as_torch(parts, "lm_head.")), (dense, {"lm_head.weight": torch.tensor(head)})):
        stored = load_file(directory / "model.safetensors")
        del stored["lm_head.weight"]
        save_file({**stored, **added}, directory / "model.safetensors")
    assert tokens(served(quantized), 3) == tokens(served(dense), 3)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["lm_head"] = False
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightError, match=r"'lm_head\.weight' is missing"):
        network(quantized)


def test_a_tied_model_that_stores_the_head_alone(tmp_path: Path) -> None:
    """Of two names of the same memory AutoAWQ 0.2.7 keeps the head's."""
    quantized, dense = write_models(tmp_path, Kind("awq", 4, 32), tie_word_embeddings=True)
    stored = load_file(quantized / "model.safetensors")
    embedding = stored.pop("model.embed_tokens.weight")
    save_file({**stored, "lm_head.weight": embedding}, quantized / "model.safetensors")
    assert torch.equal(network(quantized).embedding, embedding)
    assert tokens(served(quantized), 3) == tokens(served(dense), 3)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(WeightError, match=r"'model\.embed_tokens\.weight' is missing"):
        network(quantized)


@pytest.mark.parametrize(
    ("raw", "nulls", "expected"),
    [
        (GPTQ_4, ["desc_act", "sym", "checkpoint_format", "format", "lm_head", "dynamic", "pack_dtype", "adapter",
                  "is_marlin_format", "modules_in_block_to_quantize"], GPTQ(bits=4, group_size=32)),
        (AWQ_4, ["version", "zero_point", "format", "modules_to_not_convert", "lm_head", "dynamic", "adapter"],
         AWQ(bits=4, group_size=32)),
        ({**AUTO_ROUND, "sym": True}, ["packing_format", "data_type", "act_bits", "extra_config", "sym",
                                       "block_name_to_quantize"], GPTQ(bits=4, group_size=32)),
    ],
)  # fmt: skip
def test_a_field_that_is_null_is_absent(raw: dict[str, Any], nulls: list[str], expected: Any) -> None:
    assert parse_format({**raw, **dict.fromkeys(nulls)}) == expected
    if "dynamic" in nulls:
        dynamic = {"a": {"bits": None, "group_size": 64}}
        scheme = parse_format({**raw, "dynamic": dynamic}).scheme("a")
        assert scheme is not None
        assert (scheme.bits, scheme.group_size) == (4, 64)


COMPRESSED_4 = settings(Kind("compressed-tensors", 4, 32))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gguf"}, "quant_method 'gguf': GGUF, llama.cpp's format, is not read. Take the safetensors"),
        ({"quant_method": "hqq", "quant_config": {}}, "quant_method 'hqq': HQQ.* Take the dense model, then `tk quan"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes': bitsandbytes .* dequantize\\(\\)"),
        ({"load_in_8bit": True}, "'bitsandbytes': bitsandbytes .* is not read"),
        ({"load_in_4bit": True}, "'bitsandbytes': bitsandbytes .* is not read"),
        ({"quant_method": "BitsAndBytes", "load_in_4bit": True}, "'BitsAndBytes': bitsandbytes .* is not read"),
        ({"quant_method": "bitsandbytes_8bit"}, "'bitsandbytes_8bit': bitsandbytes .* is not read"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt': quant_algo 'NVFP4' is not supported: NVFP4"),
        (
            {**COMPRESSED_4, "format": "mixed-precision", "config_groups": {"fp4": {"format": "nvfp4-pack-quantized"}}},
            "config_groups.fp4.format 'nvfp4-pack-quantized' is not supported: NVFP4",
        ),
        ({**COMPRESSED_4, "format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported: NVFP4, 4-bit"),
        ({**COMPRESSED_4, "format": "mxfp4-pack-quantized"}, "'mxfp4-pack-quantized' is not supported: MXFP4, 4-bit"),
    ],
)
def test_a_format_that_is_not_read_is_refused_by_name(
    write_checkpoint: WriteCheckpoint, quantization: dict[str, Any], message: str
) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": quantization})
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config: .*{message}"):
        load_config(directory)


def test_modelopt_s_own_file_is_read_where_config_json_says_nothing(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({}, **SHAPE)
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: .*'modelopt': quant_algo 'NVFP4' is not supported"):
        load_config(directory)


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_of_gguf_is_called_that(write_checkpoint: WriteCheckpoint, has_config: bool) -> None:
    directory = write_checkpoint({}, **SHAPE)
    (directory / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    load_config(directory)  # safetensors are there too
    (directory / "model.safetensors").unlink()
    if not has_config:
        (directory / "config.json").unlink()
    for name in (str(directory), directory, str(directory / "model-Q4_K_M.gguf"), directory / "model-Q4_K_M.gguf"):
        with pytest.raises(ConfigError, match=r"model-Q4_K_M\.gguf: GGUF, llama\.cpp's format, is not read\. Take the"):
            find_model(name)


AUTO_ROUND_FP8 = {
    "quant_method": "auto-round", "packing_format": "auto_round:fp8", "bits": 8, "data_type": "fp", "act_bits": 8,
    "act_dynamic": True, "group_size": [128, 128], "sym": True, "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128], "block_name_to_quantize": "model.layers",
}  # fmt: skip


def test_auto_round_s_fp8_is_fp8_with_layers_that_are_dense() -> None:
    found = parse_format({**AUTO_ROUND_FP8, "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}}})
    assert isinstance(found, FP8)
    assert (found.activation_scheme, found.weight_block_size) == ("dynamic", [128, 128])
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "other.layers.0.mlp.up_proj", "lm_head")
    assert [found.scheme(name) is None for name in names] == [False, True, True, True]
    assert found.scheme(names[0]) == parse_format({**AUTO_ROUND_FP8, "quant_method": "fp8"}).scheme(names[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act_bits": 16}, "act_bits: Input should be 8, got 16"),
        ({"data_type": "int"}, "data_type: Input should be 'fp', got 'int'"),
        ({"fmt": "e5m2"}, "fmt: .*'e5m2'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size: blocks of \[64, 64\] are not supported"),
        ({"extra_config": {"a": {"bits": 4}}}, r"extra_config\['a'\]: 'auto_round:fp8' .* with bits 16; got bits 4"),
        ({"extra_config": {"a(": {"bits": 16}}}, r"'a\(': .*unterminated"),
    ],
)
def test_an_fp8_config_of_auto_round_that_is_not_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"quant_method auto-round: .*{message}"):
        parse_format({**AUTO_ROUND_FP8, **changes})
