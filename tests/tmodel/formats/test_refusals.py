"""What is wrong with a checkpoint is said before it is served: file, tensor, rule, and what is supported."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tmodel.conftest import WriteCheckpoint
from tests.tmodel.formats.by_hand import Kind, as_torch, linear, settings
from tests.tmodel.formats.models import SHAPE, write_models
from tests.tmodel.formats.test_layouts import INPUTS, OUTPUTS, saved
from tests.tmodel.packed import load
from tkernels.quantized.weight import dequantize
from tmodel import ConfigError, WeightError, load_config
from tmodel.formats import AWQ, GPTQ, FormatWarning, SqueezeLLM, parse_format
from tmodel.quantization import LinearShape, Quantization

GPTQ_4 = settings(Kind("gptq", 4, 32))
AWQ_4 = settings(Kind("awq", 4, 32))
COMPRESSED_4 = settings(Kind("compressed-tensors", 4, 32))
GROUP = COMPRESSED_4["config_groups"]["group_0"]


def compressed(**changes: Any) -> dict[str, Any]:
    """COMPRESSED_4 with changes to its one group's weights."""
    return {**COMPRESSED_4, "config_groups": {"g": {**GROUP, "weights": {**GROUP["weights"], **changes}}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "aqlm"}, "unknown quant_method 'aqlm'; supported are gptq, awq, compressed-tensors, squee"),
        ({"quant_method": "compressed_tensors"}, "did you mean 'compressed-tensors'"),
        ({"bits": 4}, "unknown quant_method None"),
        ([], "quantization_config: Input should be a valid dictionary"),
        *(
            ({**GPTQ_4, "bits": bits}, f"bits: {bits} bits; supported are 2, 3, 4, 8: .*planar.*, which is not")
            for bits in (5, 6, 7)
        ),
        ({**GPTQ_4, "bits": 16}, "bits: 16 bits; supported are 2, 3, 4, 8"),
        ({**GPTQ_4, "bits": "4"}, "bits: .*integer, got '4'"),
        *(
            ({**raw, "bits": bits}, rf"bits: must be an integer, got {bits}; supported are {supported}")
            for raw, supported in [(GPTQ_4, "2, 3, 4, 8"), (AWQ_4, "4")]
            for bits in (True, 4.0)
        ),
        ({**GPTQ_4, "bits": "4"}, "bits: must be an integer, got '4'; supported are 2, 3, 4, 8"),
        *(
            ({**raw, name: None}, f"{name}: Field required")
            for raw, name in [(GPTQ_4, "bits"), (AWQ_4, "bits"), ({"quant_method": "squeezellm"}, "wbits")]
        ),
        (compressed(num_bits="4"), "num_bits: must be an integer, got '4'; supported are 2, 3, 4, 8"),
        ({**GPTQ_4, "group_size": 0}, "group_size 0; supported are -1 .* multiples of 8 at 4 bits, such as 32, 64"),
        ({**GPTQ_4, "bits": 3, "group_size": 48}, "group_size 48; supported are -1 .* multiples of 32 at 3 bits"),
        ({**GPTQ_4, "group_size": 96}, r"layers\.0\.self_attn\.q_proj: group_size 96 does not divide its 128 inputs"),
        ({**GPTQ_4, "checkpoint_format": "marlin"}, "checkpoint_format: .*'gptq' or 'gptq_v2', got 'marlin'"),
        ({**GPTQ_4, "checkpoint_format": None, "format": "bitblas"}, "gptq: format: .*'gptq_v2', got 'bitblas'"),
        ({**GPTQ_4, "is_marlin_format": True}, "is_marlin_format: .*False, got True"),
        ({**GPTQ_4, "pack_dtype": "int8"}, "pack_dtype: .*'int32', got 'int8'"),
        ({**GPTQ_4, "dynamic": {"+:.*": {"bits": 6}}}, r"dynamic\['\+:\.\*'\]: bits: 6 bits; supported are .*planar"),
        ({**GPTQ_4, "dynamic": {"+:(": {}}}, r"dynamic\['\+:\('\]: .*unterminated"),
        ({**GPTQ_4, "dynamic": {"+:a{99999999999999}": {}}}, "the repetition number is too large"),
        ({**GPTQ_4, "dynamic": {"+:((a{100}){100}){100}": {}}}, "its repeats multiply to more than 10000"),
        ({**GPTQ_4, "dynamic": {"-:" + "(" * 9000 + ")" * 9000: {}}}, "recursion"),
        ({**GPTQ_4, "dynamic": {"+:.*": {"bitz": 8}}}, "unknown bitz; supported are bits, group_size, desc_act, sym"),
        ({**GPTQ_4, "dynamic": {"+:.*": {"pack_dtype": "int8"}}}, "pack_dtype: .*'int32', got 'int8'"),
        ({**AWQ_4, "dynamic": {"+:.*": {"bits": 8}}}, r"dynamic\['\+:\.\*'\]: bits: 8 bits; supported are 4"),
        ({**AWQ_4, "dynamic": {"+:.*": {"bitz": 4}}}, "unknown bitz; supported are bits, group_size, zero_point, "),
        ({**AWQ_4, "dynamic": {"+:(": {}}}, r"dynamic\['\+:\('\]: .*unterminated"),
        ({**AWQ_4, "lm_head": "yes"}, "lm_head: .*boolean, got 'yes'"),
        ({**AWQ_4, "pack_dtype": "int8"}, "pack_dtype: .*'int32', got 'int8'"),
        *(
            ({**raw, "adapter": {"rank": 8}}, r"adapter: .*LoRA adapter, which is not applied here, got {'rank': 8}; "
             "merge it into the dense model and quantize that, or set adapter to null to serve .* without it$")
            for raw in (GPTQ_4, AWQ_4)
        ),
        ({**AWQ_4, "format": "gemv"}, "format: the packing of format 'gemv' is not supported; 'gemm' is"),
        ({**AWQ_4, "checkpoint_format": "gemv_fast"}, "checkpoint_format: .*'gemv_fast' is not supported; 'gemm' is"),
        ({**AWQ_4, "bits": 8}, "8 bits; supported are 4"),
        ({**AWQ_4, "version": "gemv"}, "version: the packing of version 'gemv' is not supported; 'gemm' is"),
        ({**AWQ_4, "version": "gemv_fast"}, "'gemv_fast' is not supported"),
        ({**COMPRESSED_4, "format": "marlin-24"}, "format: 'marlin-24' is not supported; 'pack-quantized', 'int-quan"),
        ({**COMPRESSED_4, "format": "int-quantized"}, "group_0.weights: outside 'pack-quantized' 8 bits are supported"),
        ({**COMPRESSED_4, "config_groups": {}}, "config_groups: .*at least 1"),
        (compressed(num_bits=5), "5 bits; supported are 2, 3, 4, 8"),
        (compressed(type="float"), r"config_groups\.g\.weights\.type: .*'int', got 'float'"),
        (compressed(strategy="block"), r"strategy: .*'group' or 'channel', got 'block'"),
        (compressed(group_size=None), "strategy 'group' needs a group_size"),
        ({**COMPRESSED_4, "ignore": ["re:("]}, r"'re:\(': .*unterminated"),
        ({**COMPRESSED_4, "ignore": ["re:lm_head{e<=1}"]}, r"'re:lm_head{e<=1}': '{' in it is understood in two ways"),
        ({**COMPRESSED_4, "ignore": ["re:[[:alpha:]]*"]}, r"'\[:' in it is understood in two ways"),
        ({**COMPRESSED_4, "ignore": ["re:a{99999999999999}"]}, "the repetition number is too large"),
        ({"quant_method": "squeezellm", "wbits": 2}, "wbits: 2 bits; supported are 3, 4"),
        ({"quant_method": "squeezellm"}, "wbits: Field required"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_supported(write_checkpoint: WriteCheckpoint, quantization: Any, message: str) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": quantization})
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(directory)


def test_what_is_escaped_is_no_part_of_what_is_ambiguous() -> None:
    """`[\\.:]` is a point or a colon, and no class begins in it."""
    ignored = parse_format({**COMPRESSED_4, "ignore": [r"re:.*[\.:]up_proj", r"re:a\{b\[:"]})
    schemes = [ignored.scheme(name) for name in ("model.up_proj", "model:up_proj", "model_up_proj", "a{b[:")]
    assert [scheme is None for scheme in schemes] == [True, True, False, True]


NESTED = "(?:(.+?)(.+?))+(?:jx|px)"
"""It goes through every way of cutting a name into parts, 2**30 of them."""


@pytest.mark.parametrize(
    ("quantization", "field"),
    [
        ({**GPTQ_4, "dynamic": {f"-:{NESTED}": {}}}, "dynamic"),
        ({**AWQ_4, "dynamic": {NESTED: {}}}, "dynamic"),
        ({**COMPRESSED_4, "ignore": [f"re:{NESTED}"]}, "ignore"),
        ({**COMPRESSED_4, "config_groups": {"g": {**GROUP, "targets": [f"re:{NESTED}"]}}}, "config_groups.g.targets"),
        (
            {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": [NESTED]},
            "modules_to_not_convert",
        ),
    ],
)  # fmt: skip
def test_an_expression_without_an_end_is_stopped(
    write_checkpoint: WriteCheckpoint, quantization: dict[str, Any], field: str
) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": quantization})
    with pytest.raises(ConfigError, match=rf"config\.json: quantization_config: {field}: .*is not matched") as caught:
        load_config(directory)
    assert NESTED in str(caught.value)
    assert "'model.layers.0." in str(caught.value)


def test_expressions_that_each_take_long_are_stopped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tmodel.quantization._MAX_SECONDS", 0)
    with pytest.raises(ConfigError, match="quantization_config: 1 layers' names took 0 s to match"):
        Quantization(GPTQ(bits=4, group_size=32), (LinearShape(("a.b", "a.c"), (32, 32), 32),))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            {"hidden_size": 100},
            r"self_attn\.q_proj: its 100 inputs are no multiple of 32, the codes of 3 bits in a row of words",
        ),
        ({"head_dim": 2}, r"model\.layers\.0\.self_attn\.q_proj: 8 zero-points of 3 bits do not fill whole words"),
    ],
)
def test_a_size_that_does_not_divide(write_checkpoint: WriteCheckpoint, shape: dict[str, int], message: str) -> None:
    directory = write_checkpoint({}, **{**SHAPE, **shape, "quantization_config": {**GPTQ_4, "bits": 3}})
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(directory)


def test_inputs_that_fill_no_words_of_squeezellm_are_refused_but_for_the_head() -> None:
    def check(name: str, inputs: int) -> None:
        Quantization(SqueezeLLM(wbits=3), (LinearShape((name,), (8,), inputs),))

    with pytest.raises(ConfigError, match=r"^a\.b: its 100 inputs are no multiple of 32, the codes of 3 bits"):
        check("a.b", 100)
    check("a.b", 96)
    check("lm_head", 100)


@pytest.mark.parametrize(
    ("name", "own", "expected"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True, "damp_percent": 0.01},
         GPTQ(bits=4, group_size=32, desc_act=True)),
        ("quantize_config.json", {"bits": 8, "group_size": -1, "format": "gptq_v2", "sym": False},
         GPTQ(bits=8, group_size=-1, checkpoint_format="gptq_v2", sym=False)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
         AWQ(bits=4, group_size=64)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "format": "gemm", "checkpoint_format": None},
         AWQ(bits=4, group_size=64)),
        ("quantize_config.json", {"bits": 4, "group_size": 32, "dynamic": {"a": {"bits": 8, "damp_percent": 0.1}}},
         GPTQ(bits=4, group_size=32, dynamic={"a": {"bits": 8, "damp_percent": 0.1}})),
        ("quant_config.json", {"wbits": 3}, SqueezeLLM(wbits=3)),
    ],
)  # fmt: skip
def test_a_config_of_its_own_beside_config_json(
    write_checkpoint: WriteCheckpoint, name: str, own: dict[str, Any], expected: Any
) -> None:
    directory = write_checkpoint({}, **SHAPE)
    (directory / name).write_text(json.dumps(own))
    quantization = load_config(directory).quantization
    assert quantization is not None
    assert quantization.format == expected
    both = write_checkpoint({}, **{**SHAPE, "quantization_config": expected.config()})
    assert load_config(both).quantization == quantization
    (directory / name).write_text(json.dumps({**own, "bits": 2, "w_bit": 2, "wbits": 2}))
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_config(both)


def test_two_configs_that_disagree(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": GPTQ_4})
    (directory / "quantize_config.json").write_text(json.dumps({**GPTQ_4, "checkpoint_format": "gptq_v2"}))
    with pytest.raises(
        ConfigError,
        match=r"quantize_config\.json: it disagrees with config\.json: checkpoint_format is 'gptq_v2' and 'gptq'",
    ):
        load_config(directory)


def test_an_architecture_without_a_list_of_layers_is_not_quantized(write_checkpoint: WriteCheckpoint) -> None:
    from tmodel.quantization import Quantization

    with pytest.raises(ConfigError, match="quantized models of this architecture are not supported"):
        Quantization(GPTQ(bits=4, group_size=32), ())


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[dict[str, Any]], None]:
    def apply(tensors: dict[str, Any]) -> None:
        made = change(tensors.pop(f"a.b.{name}").clone())
        if made is not None:
            tensors[f"a.b.{name}"] = made.contiguous()

    return apply


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with its last element changed."""

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[-1] = value
        return tensor

    return apply


G_IDX = Kind("gptq", 4, 32, act_order=True)
ORDERED = Kind("compressed-tensors", 4, 32, act_order=True)
LOOKUP = Kind("squeezellm", 4)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        *(
            (kind, name, put(value), rf"has {found} at \[\d+, \d+\]; every value of it must be finite")
            for kind, name in [(G_IDX, "scales"), (Kind("awq", 4, 32), "scales"), (ORDERED, "weight_scale"),
                               (LOOKUP, "lookup_table"), (LOOKUP, "full_rows")]
            for value, found in [(float("nan"), "a NaN"), (float("inf"), "an infinity"), (float("-inf"), "an infinity")]
        ),
        (LOOKUP, "vals", put(float("nan")), r"has a NaN at \[\d+\]"),
        (G_IDX, "g_idx", lambda g: g[1:], r"has shape \[255\], where \[K\] = \[256\] is expected"),
        (G_IDX, "g_idx", put(8), "names group 8; there are 8, counted from 0"),
        (G_IDX, "g_idx", put(-1), "names group -1; there are 8"),
        (G_IDX, "g_idx", lambda g: g.clamp(max=6), r"gives group 6 64 inputs; each of 8 must have group_size = 32"),
        (ORDERED, "weight_g_idx", put(99), "names group 99; there are 8"),
        *(
            (kind, name, lambda tensor: None, f"'a.b.{name}' is missing from model.safetensors")
            for kind, names in [
                (G_IDX, ("qweight", "qzeros", "scales", "g_idx")),
                (Kind("awq", 4, 32), ("qweight", "qzeros", "scales")),
                (ORDERED, ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")),
                (LOOKUP, ("qweight", "lookup_table", "rows", "cols", "vals", "full_rows", "full_row_indices")),
            ]
            for name in names
        ),
        (G_IDX, "qweight", lambda w: w[:-1], r"has shape \[31, 32\], where \[K \* 4 / 32, N\] = \[32, 32\] is"),
        (G_IDX, "scales", lambda s: s[:, 1:], r"has shape \[8, 31\], where \[K / group_size, N\] = \[8, 32\]"),
        (G_IDX, "qzeros", lambda z: z[:-1], r"has shape \[7, 4\], where \[K / group_size, N \* 4 / 32\] = \[8, 4\] is"),
        (G_IDX, "qweight", lambda w: w.long(), "is stored as I64; supported are I32"),
        (G_IDX, "scales", lambda s: s.int(), "is stored as I32; supported are F16, BF16, F32"),
        (ORDERED, "weight_shape", lambda s: s.flip(0), r"is \[256, 32\], config\.json asks for \[32, 256\]"),
        (LOOKUP, "rows", put(3), "must rise from 0 to the"),
        (LOOKUP, "rows", lambda r: r.flip(0), "must rise from 0 to the"),
        (LOOKUP, "rows", lambda r: torch.cat((r[:1], r[1:-1].flip(0), r[-1:])), "must rise from 0 to the"),
        (LOOKUP, "cols", put(256), "there are 256 inputs"),
        (LOOKUP, "full_row_indices", put(32), "there are 32 outputs"),
        (LOOKUP, "lookup_table", lambda t: t[:, :8], r"has shape \[32, 8\], where \[N, 2\*\*4\] = \[32, 16\]"),
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_meant(
    kind: Kind, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors = as_torch(linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))[0], "a.b.")
    changed(name, change)(tensors)
    where = rf"'a\.b\.{name}'" if "missing" not in message else ""
    with pytest.raises(WeightError, match=rf"{tmp_path}.*{where}.*{message}"):
        parse_format(settings(kind)).read(saved(tmp_path, tensors), "a.b", OUTPUTS, INPUTS)


def test_a_group_out_of_order_needs_desc_act(tmp_path: Path) -> None:
    tensors = as_torch(linear(G_IDX, OUTPUTS, INPUTS, np.random.default_rng(0))[0], "a.b.")
    with pytest.raises(WeightError, match=r"'a\.b\.g_idx' puts inputs into groups out of their order, but desc_act is"):
        parse_format(GPTQ_4).read(saved(tmp_path, tensors), "a.b", OUTPUTS, INPUTS)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("is_in", "said"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
@pytest.mark.parametrize("sym", [True, False])
def test_the_words_decide_between_v1_and_v2(bits: int, is_in: str, said: str, sym: bool, tmp_path: Path) -> None:
    """A symmetric file whose metadata names the other version, whether or not it calls itself symmetric."""
    tensors, dense = linear(Kind(is_in, bits, 32, symmetric=True), OUTPUTS, INPUTS, np.random.default_rng(0))
    checkpoint = saved(tmp_path, as_torch(tensors, "a.b."))
    wrong = parse_format({**settings(Kind(said, bits, 32, symmetric=sym))})
    with pytest.warns(
        FormatWarning, match=rf"model\.safetensors: tensor 'a\.b\.qzeros' is of checkpoint_format {is_in}, not"
    ):
        weight = wrong.read(checkpoint, "a.b", OUTPUTS, INPUTS)
    assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))
    right = parse_format({**settings(Kind(is_in, bits, 32, symmetric=sym))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right.read(checkpoint, "a.b", OUTPUTS, INPUTS)


def test_known_words_of_symmetric_files(tmp_path: Path) -> None:
    """0x77777777 is v1 and 0x88888888 v2, whatever the metadata says."""
    kind = Kind("gptq_v2", 4, 128, symmetric=True)
    tensors, dense = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))
    for word in (0x77777777, 0x88888888 - 2**32):
        tensors["qzeros"] = np.full_like(tensors["qzeros"], word)
        for said in ("gptq", "gptq_v2"):
            quantization = parse_format({**settings(kind), "checkpoint_format": said})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FormatWarning)
                weight = quantization.read(saved(tmp_path, as_torch(tensors, "a.b.")), "a.b", OUTPUTS, INPUTS)
            assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))


def test_a_symmetric_file_with_other_zero_points_is_neither_version(tmp_path: Path) -> None:
    tensors, _ = linear(Kind("gptq", 4, 32), OUTPUTS, INPUTS, np.random.default_rng(0))
    checkpoint = saved(tmp_path, as_torch(tensors, "a.b."))
    with pytest.raises(
        WeightError, match=r"qzeros' holds zero-points from 0 to 15, but sym is true: all must be 7 .*v1.* 8"
    ):
        GPTQ(bits=4, group_size=32).read(checkpoint, "a.b", OUTPUTS, INPUTS)


def test_zero_points_that_a_version_cannot_hold_are_not_written(tmp_path: Path) -> None:
    tensors, _ = linear(Kind("gptq_v2", 4, 32), OUTPUTS, INPUTS, np.random.default_rng(0))
    second = GPTQ(bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2")
    weight = second.read(saved(tmp_path, as_torch(tensors, "a.b.")), "a.b", OUTPUTS, INPUTS)
    with pytest.raises(ValueError, match="a.b: zero-points from 0 to 15; 1 to 16 can be held at 4 bits"):
        GPTQ(bits=4, group_size=32, sym=False).encode("a.b", weight)
    with pytest.raises(ValueError, match="a.b: it has zero-points, but sym is true"):
        GPTQ(bits=4, group_size=32, checkpoint_format="gptq_v2").encode("a.b", weight)
    with pytest.raises(ValueError, match="a.b: uniform codes of 4 bits in groups of 32, but the format holds .* of 8"):
        GPTQ(bits=8, group_size=32).encode("a.b", weight)


def test_a_layer_that_is_dense_where_the_config_says_otherwise(tmp_path: Path) -> None:
    quantized, _ = write_models(
        tmp_path, lambda name: None if name.endswith("0.mlp.up_proj") else Kind("awq", 4, 32), AWQ_4
    )
    message = r"model\.safetensors: tensor 'model\.layers\.0\.mlp\.up_proj\.weight' is dense, but quantization_config"
    with pytest.raises(WeightError, match=message):
        load(quantized, torch.float32)


def test_a_bias_that_no_layer_has_must_be_zero(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantized, _ = write_models(tmp_path, Kind("gptq", 4, 32))
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.bias"
    save_file({**tensors, name: torch.zeros(128)}, quantized / "model.safetensors")
    load(quantized, torch.float32)
    save_file({**tensors, name: torch.ones(128)}, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=rf"'{name}' is not zero, but config\.json says that the layer has none"):
        load(quantized, torch.float32)


def test_scales_beyond_float16_are_refused_in_float16(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantized, _ = write_models(tmp_path, Kind("squeezellm", 4))
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.vals"][3] = 1e5
    save_file(tensors, quantized / "model.safetensors")
    load(quantized, torch.float32)
    with pytest.raises(WeightError, match=r"layer 'model\.layers\.0\.mlp\.down_proj' has .* beyond float16's range"):
        load(quantized, torch.float16)
