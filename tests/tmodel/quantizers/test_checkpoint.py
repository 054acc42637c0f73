"""Whole checkpoints: what is written, what a killed run leaves, and what is refused."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from tests.tmodel.packed import Driver, in_one_go, load
from tests.tmodel.quantizers.test_layers import layers_of
from tests.tmodel.test_parity import random_model
from tkernels.quantized import scaled_weight
from tkernels.quantized.weight import QuantizedWeight, dequantize
from tmodel import load_config
from tmodel.formats import FORMATS, parse_format
from tmodel.quantizers import METHODS
from tmodel.quantizers.awq import fold_scales
from tmodel.quantizers.calibration import choose_windows, collect_inputs, forward
from tmodel.quantizers.checkpoint import Job, choose_calibration_windows, plan_job, quantize_checkpoint
from tmodel.quantizers.layers import layer_groups, layer_tensors, linear_names
from tmodel.quantizers.method import Layer, QuantizedLayer
from tmodel.quantizers.rtn import round_to_nearest
from tmodel.quantizers.unfinished import QuantizerError
from tmodel.weights import Checkpoint, WeightError

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}
CASES = [
    ("rtn", 4, 32), ("rtn", 3, -1), ("gptq", 4, 32), ("gptq", 2, 32), ("gptq", 3, 32), ("gptq", 8, -1), ("awq", 4, 32),
    ("squeezellm", 3, -1), ("squeezellm", 4, -1), ("smoothquant", 8, -1), ("fp8", 8, -1),
]  # fmt: skip
WINDOW = 24


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("dense"), **SHAPE)


def job(source: Path, method: str, bits: int, group_size: int) -> Job:
    tokens = torch.randint(97, (20 * WINDOW,), generator=torch.Generator().manual_seed(0))
    planned = plan_job(source, METHODS[method], bits, group_size)
    return dataclasses.replace(planned, windows=choose_calibration_windows(planned.config, tokens, WINDOW))


def silently(done: str) -> None:
    pass


def stop_at(what: str) -> Callable[[str], None]:
    def progress(done: str) -> None:
        if done == what:
            raise KeyboardInterrupt

    return progress


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize(("method", "bits", "group_size"), CASES)
def test_a_checkpoint_holds_the_model_in_its_format(
    dense: Path, method: str, bits: int, group_size: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    steps: list[str] = []
    asked = job(dense, method, bits, group_size)
    quantize_checkpoint(asked, out, steps.append)
    assert len(steps) == asked.num_steps
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    raw = json.loads((out / "config.json").read_text())
    found = parse_format(raw["quantization_config"])
    assert found == asked.format
    assert type(found) is FORMATS[raw["quantization_config"]["quant_method"]]
    original = json.loads((dense / "config.json").read_text())
    assert raw == {**original, "quantization_config": raw["quantization_config"]}
    config, (layers, _) = asked.config, layers_of(dense, torch.float32, WINDOW)
    with (
        Checkpoint(out, device="cpu", dtype=torch.float32) as mine,
        Checkpoint(dense, device="cpu", dtype=torch.float32) as theirs,
    ):
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            weights: dict[str, torch.Tensor] = {}
            originals: dict[str, torch.Tensor] = {}
            groups = layer_groups(config, index)
            sizes = [(n, k, shape.inputs) for shape in groups for n, k in zip(shape.names, shape.outputs, strict=True)]
            for name, outputs, inputs in sizes:
                read = found.read(mine, f"{prefix}.{name}", outputs, inputs)
                made = (
                    dequantize(read, torch.float32)
                    if isinstance(read, QuantizedWeight)
                    else scaled_weight.dequantize(read)
                )
                weight = theirs.tensor(f"{prefix}.{name}.weight", (outputs, inputs))
                if method == "rtn":
                    plain = dequantize(round_to_nearest(weight, bits, group_size, lowest_zero=1), torch.float32)
                    assert torch.equal(made, plain)
                weights[f"{name}.weight"], originals[f"{name}.weight"] = made, weight
            for name, shape in layer_tensors(config, index).items():
                if name.removesuffix(".weight") not in linear_names(groups):
                    weights[name], originals[name] = (one.tensor(f"{prefix}.{name}", shape) for one in (mine, theirs))
                    scaled = method in ("awq", "smoothquant") and "layernorm" in name
                    assert torch.equal(weights[name], originals[name]) or scaled
            hidden = torch.randn((4, WINDOW, 64), generator=torch.Generator().manual_seed(index))
            made, right = (forward(layers, one, index, hidden) - hidden for one in (weights, originals))
            near = {2: 1.2, 3: 0.6, 4: 0.3, 8: 0.08 if method == "fp8" else 0.03}  # a wrong order gives 1.4
            assert (made - right).norm() < near[bits] * right.norm()
        for name, shape in (("model.embed_tokens.weight", (97, 64)), ("model.norm.weight", (64,))):
            assert torch.equal(mine.tensor(name, shape), theirs.tensor(name, shape))
        mine.refuse_unused()


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"desc_act": True, "sym": False, "checkpoint_format": "gptq"}),
        ({"act_order": "groups"}, {"desc_act": False, "sym": False, "checkpoint_format": "gptq"}),
        ({"symmetric": True}, {"desc_act": True, "sym": True, "checkpoint_format": "gptq"}),
        ({"symmetric": True, "checkpoint_format": "gptq_v2", "act_order": "none"},
         {"desc_act": False, "sym": True, "checkpoint_format": "gptq_v2"}),
        ({"checkpoint_format": "gptq_v2", "search": True}, {"desc_act": True, "sym": False,
                                                            "checkpoint_format": "gptq_v2"}),
    ],
)  # fmt: skip
def test_what_gptq_is_told_is_in_the_checkpoint(
    dense: Path, options: dict[str, object], settings: dict[str, object], tmp_path: Path
) -> None:
    """And what is read from it are the weights that the method chose, bit for bit, in either version."""
    asked = job(dense, "gptq", 4, 32)
    asked = dataclasses.replace(asked, method=asked.method.with_options(options))
    chosen: dict[str, torch.Tensor] = {}

    def kept(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
        made = asked.method.quantize(layer, bits, group_size)
        for name, weight in made.linears.items():
            chosen[f"model.layers.{layer.index}.{name}"] = dequantize(weight, torch.float64)
        return made

    watched = dataclasses.replace(asked.method, quantize=kept)
    quantize_checkpoint(dataclasses.replace(asked, method=watched), tmp_path / "out", silently)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {name: raw[name] for name in settings} == settings
    found = parse_format(raw)
    assert len(chosen) == 14
    with Checkpoint(tmp_path / "out", device="cpu", dtype=torch.float32) as stored, warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, weight in chosen.items():
            outputs, inputs = weight.shape
            read = found.read(stored, name, outputs, inputs)
            assert torch.equal(dequantize(read, torch.float64), weight)
            assert read.symmetric == settings["sym"]
            assert (read.permutation is not None) == settings["desc_act"]


def test_a_job_that_walks_through_no_layers_has_no_windows(dense: Path) -> None:
    told = plan_job(dense, METHODS["rtn"], 4, 32).options()
    assert told["tokens of a calibration window"] is told["sha256 of the calibration windows"] is None


def test_a_method_is_told_the_checkpoints_dtype(dense: Path, tmp_path: Path) -> None:
    told: list[torch.dtype] = []

    def quantize(layer: Layer, bits: int, group_size: int) -> QuantizedLayer:
        told.append(layer.dtype)
        raise KeyboardInterrupt

    asked = job(dense, "rtn", 4, 32)
    asked = dataclasses.replace(asked, method=dataclasses.replace(asked.method, quantize=quantize))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(asked, tmp_path / "out", silently)
    assert told == [torch.float32]


def test_a_methods_options_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        METHODS["gptq"].options.damping = 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("gptq", {"dampign": 0.1}, "gptq has no option 'dampign': its options are damping, .*did you mean 'damping'"),
        ("gptq", {"damping": 0}, "gptq's options: damping: .*greater than 0, got 0"),
        ("gptq", {"damping": "much"}, "gptq's options: damping: .*valid number, got 'much'"),
        ("gptq", {"act_order": "group"}, "gptq's options: act_order: .*'inputs', 'groups' or 'none', got 'group'"),
        ("gptq", {"checkpoint_format": "v2"}, "checkpoint_format: .*'gptq' or 'gptq_v2', got 'v2'"),
        ("gptq", {"search": 1}, "gptq's options: search: .*valid boolean, got 1"),
        ("rtn", {"damping": 0.1}, "rtn has no option 'damping': it has no options"),
    ],
)
def test_options_that_a_method_has_not(method: str, options: dict[str, object], expected: str) -> None:
    with pytest.raises(QuantizerError, match=expected):
        METHODS[method].with_options(options)


@pytest.mark.parametrize(
    ("method", "bits", "stopped", "left"),
    [
        ("rtn", 4, "layer 0", ["layer 0", "layer 1"]),
        ("gptq", 4, "layer 0", ["layer 0", "layer 1"]),
        ("awq", 4, "layer 0", ["layer 0", "layer 1"]),
        ("squeezellm", 3, "layer 1", ["layer 0, forward", "layer 1, forward", "layer 1", "layer 0"]),
        ("squeezellm", 3, "layer 0, forward", ["layer 0, forward", "layer 1, forward", "layer 1", "layer 0"]),
    ],
)
def test_a_killed_run_goes_on_with_the_layers_that_are_done(
    dense: Path, method: str, bits: int, stopped: str, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_size = 32 if METHODS[method].grouped else -1
    asked = job(dense, method, bits, group_size)
    quantize_checkpoint(asked, tmp_path / "whole", silently)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(asked, out, stop_at(stopped))
    assert not out.exists()
    done: list[int] = []

    def counted(layer: Layer, bits: int, group_size: int) -> object:
        done.append(layer.index)
        return METHODS[method].quantize(layer, bits, group_size)

    again = dataclasses.replace(asked, method=dataclasses.replace(asked.method, quantize=counted))
    steps: list[str] = []
    quantize_checkpoint(again, out, steps.append)
    assert steps == left
    assert len(done) == (2 if "forward" in stopped else 1)
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_other_options_do_not_go_on_with_it(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = job(dense, "gptq", 4, 32)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(asked, out, stop_at("layer 0"))
    other_text = choose_windows(torch.arange(97).repeat(5), WINDOW)
    for changed, expected in (
        (job(dense, "gptq", 3, 32), "bits was 4 and is now 3"),
        (job(dense, "gptq", 4, -1), "group_size was 32 and is now -1"),
        (job(dense, "rtn", 4, 32), "method was 'gptq' and is now 'rtn'"),
        (
            dataclasses.replace(asked, method=asked.method.with_options({"damping": 0.01})),
            "damping was 0.05 and is now 0.01",
        ),
        (dataclasses.replace(asked, windows=other_text), "sha256 of the calibration windows was"),
    ):
        with pytest.raises(QuantizerError, match=expected):
            quantize_checkpoint(changed, out, silently)
    quantize_checkpoint(asked, out, silently)


def test_a_finished_checkpoint_is_not_written_again(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(job(dense, "rtn", 4, 32), out, silently)
    before = contents(out)
    with pytest.raises(FileExistsError, match="out exists and is not an empty directory"):
        quantize_checkpoint(job(dense, "rtn", 4, 32), out, silently)
    assert contents(out) == before
    with pytest.raises(QuantizerError, match="is quantized already: config.json has a quantization_config"):
        plan_job(out, METHODS["gptq"], 4, 32)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "squeezellm"])
@pytest.mark.parametrize(
    ("tensor", "value", "found"),
    [
        ("model.layers.1.mlp.down_proj.weight", torch.nan, "has a NaN at \\[3, 5\\]"),
        ("model.embed_tokens.weight", -torch.inf, "has an infinity at \\[3, 5\\]"),
        ("model.layers.1.mlp.up_proj.weight", None, "is missing"),
    ],
)
def test_a_damaged_model_is_refused_by_file_and_tensor_before_anything_is_written(
    dense: Path, tmp_path: Path, method: str, tensor: str, value: float | None, found: str
) -> None:
    damaged, out = tmp_path / "damaged", tmp_path / "out"
    shutil.copytree(dense, damaged)
    tensors = load_file(damaged / "model.safetensors")
    if value is None:
        del tensors[tensor]
    else:
        tensors[tensor][3, 5] = value
    save_file(tensors, damaged / "model.safetensors")
    asked = job(damaged, method, 4, 32 if METHODS[method].grouped else -1)
    with pytest.raises(WeightError, match=f"damaged.*: tensor '{tensor}' {found}"):
        quantize_checkpoint(asked, out, silently)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_two_processes_do_not_write_one_checkpoint(dense: Path, tmp_path: Path) -> None:
    with (tmp_path / ".out.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(QuantizerError, match="another process is writing it"):
            quantize_checkpoint(job(dense, "rtn", 4, 32), tmp_path / "out", silently)


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "expected"),
    [
        ("awq", 3, 32, "awq writes 4 bits, not 3"),
        ("gptq", 5, 32, "gptq writes 2 and 3 and 4 and 8 bits, not 5"),
        ("squeezellm", 8, -1, "squeezellm writes 3 and 4 bits, not 8"),
        ("squeezellm", 4, 32, "squeezellm has no groups"),
        ("gptq", 4, 128, "group_size 128 does not divide its 64 inputs"),
        ("awq", 4, 64, "group_size 64 does not divide its 96 inputs"),
        ("rtn", 4, 12, "group_size 12"),
        ("rtn", 4, 0, "group_size 0"),
    ],
)
def test_settings_that_fit_no_format_are_refused(
    dense: Path, method: str, bits: int, group_size: int, expected: str
) -> None:
    with pytest.raises(QuantizerError, match=expected):
        plan_job(dense, METHODS[method], bits, group_size)


def test_experts_are_rounded_and_not_calibrated(tmp_path: Path) -> None:
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    source = random_model(tmp_path / "dense", architecture="Qwen3MoeForCausalLM", **SHAPE, **fields)
    for method in ("gptq", "awq", "squeezellm", "smoothquant"):
        with pytest.raises(QuantizerError, match=f"Qwen3MoeForCausalLM has experts, whose inputs {method} would have"):
            plan_job(source, METHODS[method], METHODS[method].bits[-1], -1)
    with pytest.raises(QuantizerError, match="experts whose inputs are quantized too"):
        plan_job(source, METHODS["fp8"], 8, -1)
    quantize_checkpoint(plan_job(source, METHODS["rtn"], 8, 32), tmp_path / "out", silently)
    sequences = [torch.arange(20)]
    rounded, exact = (
        torch.cat(Driver(load(directory, torch.float32), sequences, torch.float32).run(in_one_go([20])))
        for directory in (tmp_path / "out", source)
    )
    assert 0 < (rounded - exact).square().mean() < 1e-3 * exact.square().mean()


def test_experts_of_one_tensor_are_not_rounded(tmp_path: Path) -> None:
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    source = random_model(tmp_path, architecture="GptOssForCausalLM", **{**SHAPE, **fields})
    with pytest.raises(QuantizerError, match="gate_up_proj: experts that are stored in one tensor as .* not supported"):
        plan_job(source, METHODS["rtn"], 4, 32)


def test_too_little_calibration_text_is_refused(dense: Path) -> None:
    config = load_config(dense)
    with pytest.raises(QuantizerError, match="95 tokens of calibration text are too few; it takes 96 or more"):
        choose_calibration_windows(config, torch.zeros(95, dtype=torch.int64), 24)
    assert choose_calibration_windows(config, torch.zeros(97, dtype=torch.int64), 24).shape == (4, 25)
    with pytest.raises(QuantizerError, match="windows of 129 tokens; the model was made for 128"):
        choose_calibration_windows(config, torch.zeros(1000, dtype=torch.int64), 129)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_awq_folds_scales_that_change_nothing_before_rounding(heads: tuple[int, int], tmp_path: Path) -> None:
    directory = random_model(tmp_path, heads=heads, attention_bias=True, **SHAPE)
    layers, (weights, _) = layers_of(directory, torch.float32, WINDOW)
    groups = layer_groups(layers.config, 0)
    hidden = torch.randn((4, WINDOW, 64), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer(0, groups, weights, dtype, layers, hidden)
        seen = collect_inputs(layers, weights, 0, hidden)
        made, changed, scales = fold_scales(layer, seen, 4, 32)
        torch.testing.assert_close(
            forward(layers, made, 0, hidden), forward(layers, weights, 0, hidden), rtol=1e-4, atol=1e-4
        )
        assert any(not torch.equal(one, torch.ones_like(one)) for one in scales)
        assert {name: tensor.dtype for name, tensor in changed.items()} == dict.fromkeys(
            ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.v_proj.bias"), dtype
        )
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            assert torch.equal(made[name], changed[name].float())  # what was folded is what is kept
        ratio = made["self_attn.q_proj.weight"] / weights["self_attn.q_proj.weight"]
        torch.testing.assert_close(ratio, scales[0].float().expand_as(ratio))
