"""8-bit weights with 8-bit inputs: read bit for bit, served by the kernels of codes, refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.conftest import WriteCheckpoint
from tests.tmodel.formats.eight_bits import KINDS, Kind, linear, settings, write_models
from tests.tmodel.formats.models import SHAPE
from tests.tmodel.formats.test_layouts import saved
from tests.tmodel.formats.test_models import LIMITS, network, served, tokens
from tests.tmodel.packed import Driver, in_one_go, load
from tkernels.quantized.scaled_weight import ScaledWeight, dequantize
from tmodel import ConfigError, WeightError, kernel_axes, load_config
from tmodel.formats import parse_format
from tmodel.formats.compressed_tensors import make_w8a8
from tmodel.layers import JoinedLinear, Linear
from tsched import SamplingParams

OUTPUTS, INPUTS = 136, 256
INT8, FP8, BLOCKS = KINDS[0], KINDS[2], KINDS[5]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_is_read_and_written_bit_for_bit(kind: Kind, tmp_path: Path) -> None:
    tensors, dense = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))
    by_hand = {f"a.b.{name}": tensor for name, tensor in tensors.items()}
    quantization = parse_format(settings(kind))
    with saved(tmp_path, by_hand) as checkpoint:
        weight = quantization.read(checkpoint, "a.b", OUTPUTS, INPUTS)
        checkpoint.refuse_unused()
    assert isinstance(weight, ScaledWeight)
    assert (weight.is_blocked, weight.input_scale is not None) == (kind.scales == "block", kind.static)
    assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))
    written = {f"a.b.{name}": tensor for name, tensor in quantization.encode("a.b", weight).items()}
    assert written.keys() == by_hand.keys()
    for name, tensor in by_hand.items():
        assert (written[name].dtype, written[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(written[name].float(), tensor.float()), name
    assert parse_format(quantization.config()) == quantization


def logits(directory: Path, dtype: torch.dtype, lengths: tuple[int, int] = (30, 7), **choices: str) -> torch.Tensor:
    sequences = [torch.randint(40, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    driver = Driver(load(directory, dtype, choices), sequences, dtype)
    return torch.cat(driver.run(in_one_go([len(one) for one in sequences])))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_model_in_codes_is_near_its_dense_twin_and_is_not_it(kind: Kind, tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, kind)
    mine, exact = logits(quantized, torch.float32), logits(dense, torch.float64)
    error = (mine.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-4 < error < 0.15  # of four bits of significand, the inputs of 14 linears one after another
    ops = {"quantize_groups", "block_scaled_matmul"} if kind.scales == "block" else {"quantize_tokens", "scaled_matmul"}
    used = kernel_axes(load_config(quantized), LIMITS)
    assert ops <= set(used)
    assert "dequant_gemm" not in used
    assert set(served(quantized).kernels) == set(used)


def narrow(width: int) -> dict[str, int]:
    """Sizes of a model of one layer, which the interpreter computes in a second."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width}
    return {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, **heads}


@pytest.mark.parametrize("kind", [INT8, KINDS[1]], ids=str)
def test_int8_logits_have_the_same_bits_by_triton_kernels(kind: Kind, tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, kind, **narrow(32))
    mine = logits(quantized, torch.float32, (4, 1), quantize_tokens="row_per_program", scaled_matmul="auto")
    assert torch.equal(mine, logits(quantized, torch.float32, (4, 1)))


@pytest.mark.parametrize("kind", [FP8, BLOCKS], ids=str)
def test_fp8_models_say_the_same_by_triton_kernels(kind: Kind, tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, kind, **narrow(128 if kind.scales == "block" else 32))
    triton = {"quantize_groups": "group_tile", "block_scaled_matmul": "auto"}
    if kind.scales != "block":
        triton = {"quantize_tokens": "two_pass", "scaled_matmul": "auto"}
    llm = served(quantized, kernels=triton)
    assert triton.items() <= llm.arm.items()
    prompts, params = [[5, 6, 7], [8]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    mine, expected = (
        [output.outputs[0].token_ids for output in one.generate(prompts, params)] for one in (llm, served(quantized))
    )
    assert mine == expected


def test_parts_that_agree_are_one_weight_and_others_stay_apart(tmp_path: Path) -> None:
    def parts(directory: Path) -> list[list[int]]:
        layers = network(directory).layers
        joint = (layers[0].attention.qkv, layers[0].mlp.gate_up.projections)  # type: ignore[union-attr]
        return [[one.weight.shape[0] for one in (x.parts if isinstance(x, JoinedLinear) else (x,))] for x in joint]

    assert parts(write_models(tmp_path / "int8", INT8)[0]) == [[256], [512]]
    # 64 keys end within a block of 128 outputs, and values begin one of their own.
    assert parts(write_models(tmp_path / "blocks", BLOCKS)[0]) == [[192, 64], [512]]

    def own_scale(layer: str, tensors: dict[str, torch.Tensor]) -> None:
        if layer.endswith("v_proj"):
            tensors["input_scale"] *= 2

    assert parts(write_models(tmp_path / "static", KINDS[1], change=own_scale)[0]) == [[192, 64], [512]]


def test_layers_are_targeted_and_ignored_and_formats_mixed(tmp_path: Path) -> None:
    def kind(name: str) -> Kind | None:
        if name.endswith("o_proj"):
            return None
        return FP8 if "mlp" in name else INT8

    config = {**settings(INT8), "format": "mixed-precision", "ignore": ["lm_head", "re:.*o_proj"]}
    groups = {"all": settings(INT8)["config_groups"]["group_0"], "mlp": settings(FP8)["config_groups"]["group_0"]}
    groups["all"] = {**groups["all"], "format": "int-quantized"}
    groups["mlp"] = {**groups["mlp"], "format": "float-quantized", "targets": [r"re:.*mlp\.(gate|up|down)_proj$"]}
    quantized, dense = write_models(tmp_path, kind, {**config, "config_groups": groups})
    model = network(quantized)
    layer = model.layers[1]
    found = {"qkv": layer.attention.qkv, "o": layer.attention.output, "down": layer.mlp.down, "head": model.head}
    dtypes = {name: one.weight.dtype for name, one in found.items() if isinstance(one, Linear)}
    assert dtypes == {"qkv": torch.int8, "o": torch.float32, "down": torch.float8_e4m3fn, "head": torch.float32}
    exact = logits(dense, torch.float64)
    assert (logits(quantized, torch.float32) - exact).square().mean() < 0.02 * exact.square().mean()


@pytest.mark.parametrize(
    ("skipped", "is_dense"),
    [
        (None, lambda name: name == "lm_head"),
        (["lm_head", r"model\.layers\.0"], lambda name: name == "lm_head" or ".0." in name),
        (["down_proj"], lambda name: name == "lm_head" or name.endswith("down_proj")),
        (["lm_head", "model.layers.1.mlp"], lambda name: name == "lm_head" or "1.mlp" in name),
        (["lm_head", "model.layers.1.mlp.gate"], lambda name: name == "lm_head"),  # gate_proj is another module
        (["lm_head", r"model.layers.\d+.self_attn.[qk]_proj"], lambda name: name == "lm_head" or name[-6:-5] in "qk"),
    ],
)
def test_modules_not_to_convert_are_dense(skipped: list[str] | None, is_dense: Any) -> None:
    quantization = parse_format({**settings(BLOCKS), "modules_to_not_convert": skipped})
    names = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"] + ["lm_head"]
    names += [f"model.layers.{i}.mlp.{p}_proj" for i in range(2) for p in ("gate", "up", "down")]
    assert [name for name in names if quantization.scheme(name) is None] == [name for name in names if is_dense(name)]


def changed(kind: Kind, part: str | None = None, **changes: Any) -> dict[str, Any]:
    """A kind's settings with changes, those of a compressed-tensors group's `part` where one is named."""
    config = settings(kind)
    if part is None:
        return {**config, **changes}
    group = config["config_groups"]["group_0"]
    return {**config, "config_groups": {"g": {**group, part: {**group[part], **changes}}}}


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (changed(INT8, "weights", num_bits=4), r"config_groups\.g\.weights: outside 'pack-quantized' 8 bits are supp"),
        (changed(INT8, "weights", symmetric=False), "weights: .*symmetric"),
        (changed(INT8, "weights", strategy="group", group_size=32), "weights.strategy 'group' with dynamic .* 'token'"),
        (changed(KINDS[4], "weights", block_structure=[64, 128]), r"'block' of \[128, 128\] with dynamic 'group' of"),
        (changed(INT8, "input_activations", symmetric=False), r"input_activations\.symmetric: .*True, got False"),
        (changed(INT8, "input_activations", num_bits=4), r"input_activations\.num_bits: .*8, got 4"),
        (changed(INT8, "input_activations", type="float"), "input_activations.type: 'float' with weights of type 'int"),
        (changed(INT8, "input_activations", strategy="tensor"), "with dynamic input_activations.strategy 'tensor'"),
        (changed(INT8, "input_activations", dynamic="local"), r"input_activations\.dynamic: .*boolean, got 'local'"),
        (changed(INT8, "input_activations", dynamic=False), "with static input_activations.strategy 'token'"),
        (changed(INT8, format="mixed-precision"), "group_0: format 'mixed-precision' needs a format of each group"),
        (changed(INT8, format="marlin-24"), "format: 'marlin-24' is not supported; 'pack-quantized', 'int-quantized'"),
        (changed(INT8, kv_cache_scheme={"num_bits": 3}), "kv_cache_scheme"),
        (changed(BLOCKS, weight_block_size=[64, 64]), r"weight_block_size: blocks of \[64, 64\] are not supported; \["),
        (
            changed(BLOCKS, activation_scheme="static"),
            "activation_scheme: 'static' is supported without weight_blo",
        ),
        (changed(BLOCKS, activation_scheme="none"), "activation_scheme: .*'dynamic' or 'static', got 'none'"),
        (changed(BLOCKS, scale_fmt="ue8m0"), "scale_fmt: .*'float', got 'ue8m0'"),
        (changed(BLOCKS, fmt="e5m2"), "fmt: .*'e4m3' or 'float8_e4m3fn', got 'e5m2'"),
        (changed(BLOCKS, modules_to_not_convert=["(?i)lm_head"]), r"'\(\?i\)lm_head': global flags"),
        (changed(BLOCKS, modules_to_not_convert=["("]), r"modules_to_not_convert: '\(': .*unterminated"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    write_checkpoint: WriteCheckpoint, quantization: dict[str, Any], message: str
) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": quantization})
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(directory)


def test_weights_in_codes_whose_inputs_are_not_are_refused(write_checkpoint: WriteCheckpoint) -> None:
    config = settings(FP8)
    config["config_groups"]["group_0"]["input_activations"] = None
    directory = write_checkpoint({}, **{**SHAPE, "quantization_config": {**config, "format": "naive-quantized"}})
    with pytest.raises(ConfigError, match="group_0.input_activations: weights alone are supported in format 'pack-q"):
        load_config(directory)


def test_a_size_that_blocks_do_not_fill_is_refused(write_checkpoint: WriteCheckpoint) -> None:
    directory = write_checkpoint({}, **{**SHAPE, "hidden_size": 96, "quantization_config": settings(BLOCKS)})
    with pytest.raises(ConfigError, match=r"self_attn\.q_proj: its 96 inputs are no multiple of 128, the inputs of"):
        load_config(directory)


@pytest.mark.parametrize(
    ("kind", "name", "change", "message"),
    [
        (INT8, "weight", lambda w: w.float(), "is stored as F32; supported are I8"),
        (FP8, "weight", lambda w: w.view(torch.int8), "is stored as I8; supported are F8_E4M3"),
        (FP8, "weight", lambda w: w.view(torch.uint8).index_fill(1, torch.tensor(7), 0xFF).view(w.dtype),
         r"has a NaN at \[0, 7\]; every value"),
        (INT8, "weight", lambda w: w[1:], r"has shape \[135, 256\], where \[N, K\] = \[136, 256\] is expected"),
        (INT8, "weight_scale", lambda s: s[:, 0], r"has shape \[136\], where \[N, 1\] = \[136, 1\] is expected"),
        (INT8, "weight_scale", lambda s: s * torch.inf, r"has an infinity at \[0\]"),
        (INT8, "weight_scale", lambda s: None, "'a.b.weight_scale' is missing"),
        (KINDS[1], "input_scale", lambda s: None, "'a.b.input_scale' is missing"),
        (KINDS[1], "input_scale", lambda s: s * 0, "is 0; inputs are divided by it, so it must be 2"),
        (KINDS[1], "input_scale", lambda s: -s, "is -0.125; inputs are divided by it"),
        (KINDS[4], "weight_scale", lambda s: s[:1], r"\[1, 2\], where \[ceil\(N / 128\), K / 128\] = \[2, 2\] is"),
        (BLOCKS, "weight_scale_inv", lambda s: s.t().contiguous()[:1], r"has shape \[1, 2\], where \[ceil"),
        (BLOCKS, "weight_scale_inv", lambda s: None, "'a.b.weight_scale_inv' is missing"),
        (INT8, "weight_zero_point", lambda z: torch.ones(136, 1, dtype=torch.int8), "has a zero-point other than 0"),
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_meant(kind: Kind, name: str, change: Any, message: str, tmp_path: Path) -> None:
    tensors, _ = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))
    made = change(tensors.pop(name, None))
    tensors |= {} if made is None else {name: made.contiguous()}
    with pytest.raises(WeightError, match=rf"{tmp_path}.*{message}"):
        parse_format(settings(kind)).read(
            saved(tmp_path, {f"a.b.{name}": tensor for name, tensor in tensors.items()}), "a.b", OUTPUTS, INPUTS
        )


def test_zero_points_of_zeros_and_scales_of_16_bits_are_read(tmp_path: Path) -> None:
    tensors, _ = linear(KINDS[1], OUTPUTS, INPUTS, np.random.default_rng(0))
    tensors |= {"weight_zero_point": torch.zeros(1, dtype=torch.int8), "input_zero_point": torch.zeros(1)}
    tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
    with saved(tmp_path, {f"a.b.{name}": tensor for name, tensor in tensors.items()}) as checkpoint:
        weight = parse_format(settings(KINDS[1])).read(checkpoint, "a.b", OUTPUTS, INPUTS)
        checkpoint.refuse_unused()
    assert torch.equal(weight.scales, tensors["weight_scale"].float().expand(OUTPUTS))


def test_autofp8s_names_of_scales_are_read(tmp_path: Path) -> None:
    kind = KINDS[7]
    tensors, dense = linear(kind, OUTPUTS, INPUTS, np.random.default_rng(0))
    tensors = {name.replace("weight_scale_inv", "weight_scale").replace("activation_scale", "input_scale"): tensor
               for name, tensor in tensors.items()}  # fmt: skip
    raw = settings(kind)
    raw = {**raw, "ignored_layers": raw.pop("modules_to_not_convert")}
    with saved(tmp_path, {f"a.b.{name}": tensor for name, tensor in tensors.items()}) as checkpoint:
        weight = parse_format(raw).read(checkpoint, "a.b", OUTPUTS, INPUTS)
        checkpoint.refuse_unused()
    assert torch.equal(dequantize(weight, torch.float64), torch.from_numpy(dense))
    assert weight.input_scale is not None
    assert parse_format(raw).scheme("lm_head") is None


def test_a_format_writes_only_what_it_holds(tmp_path: Path) -> None:
    tensors, _ = linear(INT8, OUTPUTS, INPUTS, np.random.default_rng(0))
    checkpoint = saved(tmp_path, {f"a.b.{name}": tensor for name, tensor in tensors.items()})
    weight = parse_format(settings(INT8)).read(checkpoint, "a.b", OUTPUTS, INPUTS)
    with pytest.raises(ValueError, match="are .*int8, False, False.*, but the format holds .*float8_e4m3fn"):
        parse_format(settings(FP8)).encode("a.b", weight)
    with pytest.raises(ValueError, match="scales of their own, but the format holds one for all"):
        parse_format(changed(INT8, "weights", strategy="tensor")).encode("a.b", weight)
    with pytest.raises(ValueError, match="a.b: the format keeps this layer dense"):
        parse_format({**settings(INT8), "ignore": ["a.b"]}).encode("a.b", weight)
    static = replace(weight, input_scale=torch.ones(1))
    with pytest.raises(ValueError, match="int8, False, True.*, but the format holds"):
        parse_format(settings(INT8)).encode("a.b", static)


def test_one_scale_of_all_outputs_is_written_where_there_is_one_output() -> None:
    one = parse_format(changed(INT8, "weights", strategy="tensor"))
    weight = ScaledWeight(torch.ones(1, INPUTS, dtype=torch.int8), torch.full((1,), 0.5))
    assert one.encode("a.b", weight)["weight_scale"].tolist() == [0.5]


def test_what_is_written_says_nothing_of_what_it_does_not_hold() -> None:
    assert set(make_w8a8("int").config()) == {
        "quant_method",
        "quantization_status",
        "config_groups",
        "ignore",
        "format",
    }


def test_a_missing_scale_names_the_model_s_file(tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, INT8)
    stored = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight_scale"
    del stored[name]
    save_file(stored, quantized / "model.safetensors")
    with pytest.raises(WeightError, match=rf"'{name}' is missing from model\.safetensors"):
        load(quantized, torch.float32)
    (quantized / "config.json").write_text(
        json.dumps({**json.loads((quantized / "config.json").read_text()), "quantization_config": None})
    )
    with pytest.raises(WeightError, match="is stored as I8; supported are F64, F32, F16, BF16"):
        load(quantized, torch.float32)


def test_tokens_do_not_depend_on_what_is_computed_beside_them(tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, INT8)
    assert tokens(served(quantized)) == tokens(served(quantized, max_num_seqs=1))
