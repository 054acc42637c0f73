"""Quantized models as they are served: the tokens of their dense twins, whatever is mixed, fused or tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tkernels
from tests.tmodel.formats.by_hand import KINDS, Kind, settings
from tests.tmodel.formats.models import write_models
from tests.tmodel.packed import load
from tkernels.quantized.weight import QuantizedWeight
from tmodel import Limits, kernel_axes, load_config
from tmodel.decoders.pre_norm import PreNormModel
from tmodel.layers import JoinedLinear, Linear
from tsched import LLM, SamplingParams

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11], [30, 20, 10, 0, 39]]


def served(directory: Path, **changes: Any) -> LLM:
    return LLM(
        directory, **{"dtype": "float32", "device": "cpu", "kv_cache_bytes": 2**20, "max_num_seqs": 4, **changes}
    )


def tokens(llm: LLM, count: int = 8) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def network(directory: Path, **choices: str) -> PreNormModel:
    model = load(directory, torch.float32, choices)
    assert isinstance(model, PreNormModel)
    return model


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_quantized_model_says_what_its_dense_twin_says(kind: Kind, tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, kind)
    assert tokens(served(quantized)) == tokens(served(dense))


INTERPRETED = (
    Kind("gptq", 2, 32),
    Kind("gptq", 3, 32, symmetric=True),
    Kind("gptq", 4, 32),
    Kind("gptq_v2", 4, 32, act_order=True),
    Kind("gptq", 8, -1),
    Kind("awq", 4, 32, symmetric=True),
    Kind("compressed-tensors", 4, 32, act_order=True),
    Kind("squeezellm", 3),
    Kind("squeezellm", 4),
)


@pytest.mark.parametrize("kind", INTERPRETED, ids=str)
def test_so_does_a_triton_kernel(kind: Kind, tmp_path: Path) -> None:
    narrow = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    quantized, dense = write_models(tmp_path, kind, **narrow, head_dim=32)
    llm = served(quantized, kernels={"dequant_gemm": "auto"})
    assert llm.arm["dequant_gemm"] == "auto"
    assert network(quantized, dequant_gemm="auto").layers[0].mlp.down.weight.order == "interleaved"  # type: ignore[union-attr]
    prompts, params = [[5, 6, 7], [8]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    mine, expected = (
        [output.outputs[0].token_ids for output in one.generate(prompts, params)] for one in (llm, served(dense))
    )
    assert mine == expected


MIXED: dict[str, Callable[[str], Kind | None]] = {
    "query alone in 8 bits": lambda name: Kind("gptq", 8 if name.endswith("q_proj") else 4, 32),
    "values in wider groups": lambda name: Kind("gptq", 4, 64 if name.endswith("v_proj") else 32),
    "up dense": lambda name: None if name.endswith("up_proj") else Kind("gptq", 4, 32),
    "keys dense": lambda name: None if name.endswith("k_proj") else Kind("gptq", 4, 32),
    "first layer dense": lambda name: None if ".0." in name else Kind("gptq", 4, 32),
    "all dense": lambda name: None,
    "every part in another order": lambda name: Kind("gptq", 4, 32, act_order=True),
}
DYNAMIC = {
    "query alone in 8 bits": {r"+:.*\.q_proj": {"bits": 8}},
    "values in wider groups": {r".*v_proj$": {"group_size": 64, "damp_percent": 0.1}},
    "up dense": {r"-:.*up_proj": {}},
    "keys dense": {r"-:.*k_proj": {}, r"+:.*k_proj": {"bits": 8}},
    "first layer dense": {r"-:model\.layers\.0\.": {}},
    "all dense": {r"-:model\.": {}},
    "every part in another order": {r"+:.*": {"desc_act": True}},
}
PARTS = {
    "query alone in 8 bits": ([8, 4], 1),
    "values in wider groups": ([4, 4], 1),
    "up dense": ([4], 2),
    "keys dense": ([4, None, 4], 1),
    "first layer dense": ([None], 1),
    "all dense": ([None], 1),
    "every part in another order": ([4, 4, 4], 2),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_models_fuse_what_agrees(name: str, tmp_path: Path) -> None:
    quantization = {**settings(Kind("gptq", 4, 32)), "dynamic": DYNAMIC[name]}
    quantized, dense = write_models(tmp_path, MIXED[name], quantization)
    llm = served(quantized)
    assert tokens(llm) == tokens(served(dense))
    layer = network(quantized).layers[0]
    qkv = layer.attention.qkv.parts if isinstance(layer.attention.qkv, JoinedLinear) else (layer.attention.qkv,)
    bits = [part.weight.bits if isinstance(part.weight, QuantizedWeight) else None for part in qkv]
    gate_up = getattr(layer.mlp.gate_up, "projections", layer.mlp.gate_up)
    assert (bits, len(getattr(gate_up, "parts", (gate_up,)))) == PARTS[name]
    used = set(kernel_axes(load_config(quantized), LIMITS))
    assert ("dequant_gemm" in used) == (name != "all dense")
    assert ("gate_up_swiglu" in used) == (name in ("first layer dense", "all dense"))
    assert set(llm.kernels) == used


LIMITS = Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=60, block_size=16, num_blocks=32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_are_tied_and_layers_biased_as_in_a_dense_model(tied: bool, bias: bool, tmp_path: Path) -> None:
    def kind(name: str) -> Kind | None:
        return None if name.endswith("k_proj") else Kind("awq", 4, 32)

    quantization = {**settings(Kind("awq", 4, 32)), "modules_to_not_convert": ["k_proj"]}
    quantized, dense = write_models(tmp_path, kind, quantization, tie_word_embeddings=tied, attention_bias=bias)
    llm = served(quantized)
    model = network(quantized)
    assert isinstance(model.layers[0].attention.qkv, JoinedLinear)
    assert isinstance(model.head, Linear)
    assert isinstance(model.head.weight, torch.Tensor)
    assert (model.head.weight is model.embedding) == tied
    assert tokens(llm) == tokens(served(dense))


def test_layers_are_targeted_and_ignored_by_name_pattern_and_class(tmp_path: Path) -> None:
    def kind(name: str) -> Kind | None:
        if name.endswith("o_proj") or name == "model.layers.1.mlp.up_proj":
            return None
        if name == "model.layers.0.mlp.down_proj":
            return Kind("compressed-tensors", 8, -1, symmetric=True)
        return Kind("compressed-tensors", 3 if "mlp" in name else 4, 32)

    config = settings(Kind("compressed-tensors", 4, 32))
    groups = config["config_groups"]
    groups["by_pattern"] = settings(Kind("compressed-tensors", 3, 32))["config_groups"]["group_0"]
    groups["by_pattern"] = {**groups["by_pattern"], "targets": [r"re:.*mlp\.(gate|up|down)_proj$"]}
    groups["by_name"] = settings(Kind("compressed-tensors", 8, -1, symmetric=True))["config_groups"]["group_0"]
    groups["by_name"] = {**groups["by_name"], "targets": ["model.layers.0.mlp.down_proj"]}
    config["ignore"] = ["lm_head", "re:.*o_proj", "model.layers.1.mlp.up_proj"]
    quantized, dense = write_models(tmp_path, kind, config)
    assert tokens(served(quantized)) == tokens(served(dense))


def test_a_variant_that_cannot_read_the_model_is_refused_before_its_weights_are(tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, Kind("squeezellm", 3))
    (quantized / "model.safetensors").unlink()
    with pytest.raises(tkernels.SelectionError, match=r"kernels\.dequant_gemm: variant 'gemv' is unsupported here: "):
        served(quantized, kernels={"dequant_gemm": "gemv"})


def test_kernels_are_chosen_for_every_kind_of_weight_that_may_come(tmp_path: Path) -> None:
    quantization = {**settings(Kind("gptq", 4, 32)), "dynamic": {r".*down_proj": {"bits": 2, "group_size": 128}}}
    quantized, _ = write_models(tmp_path, MIXED["all dense"], quantization)
    axes = kernel_axes(load_config(quantized), LIMITS)["dequant_gemm"]
    kinds = {(way["bits"], way["group_size"], way["K"]) for way in axes}
    assert kinds == {(4, 32, 128), (2, 128, 256)}
    with_act_order = {**quantization, "dynamic": {r".*down_proj": {"desc_act": True}}}
    quantized, _ = write_models(tmp_path, MIXED["all dense"], with_act_order)
    axes = kernel_axes(load_config(quantized), LIMITS)["dequant_gemm"]
    assert {(way["K"], way["permuted"]) for way in axes} == {(128, False), (256, (False, True))}


def test_what_preparing_cost_and_what_is_kept_is_said(tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, Kind("gptq", 4, 128))
    llm, twin = served(quantized, kernels={"dequant_gemm": "auto"}), served(dense)
    kept = sum(
        part.weight.nbytes
        for layer in network(quantized, dequant_gemm="auto").layers
        for part in (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up.projections, layer.mlp.down)  # type: ignore[union-attr]
    )
    assert llm.prepare_report.bytes_after == kept == llm.prepare_report.bytes_before
    assert llm.prepare_report.seconds > 0
    norms = 2 * (2 * 128 + 2 * 32) + 128
    assert llm.weight_bytes == kept + 4 * (2 * 40 * 128 + norms)
    assert twin.prepare_report == tkernels.PrepareReport()
    assert twin.weight_bytes == sum(tensor.nbytes for tensor in _tensors(dense))


def _tensors(directory: Path) -> list[torch.Tensor]:
    from safetensors.torch import load_file

    return list(load_file(directory / "model.safetensors").values())
