"""Quantized experts: the tokens of the dense twin, one weight for all, and refusals that name the expert."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.formats import eight_bits
from tests.tmodel.formats.by_hand import Kind, settings
from tests.tmodel.formats.models import LINEARS, write_models
from tests.tmodel.formats.test_models import LIMITS, network, served, tokens
from tests.tmodel.mixtures import MIXTURE
from tests.tmodel.packed import load
from tkernels.quantized.scaled_weight import dequantize
from tkernels.quantized.stacked import StackedWeight
from tkernels.quantized.stacked_scaled import StackedScaledWeight
from tmodel import ConfigError, WeightError, kernel_axes, load_config
from tmodel.decoders.experts import ExpertsLayer
from tmodel.formats.base import ScaledScheme, Scheme
from tmodel.layers import ExpertsMLP

QWEN3_MOE: Mapping[str, Any] = {**MIXTURE, "moe_intermediate_size": 128}
MIXTRAL: Mapping[str, Any] = {**QWEN3_MOE, "architectures": ["MixtralForCausalLM"], "intermediate_size": 128}
GPTQ = Kind("gptq", 4, 32)
BLOCKS = eight_bits.Kind("fp8", "float", "block")
EXPERT = "model.layers.1.mlp.experts.2"


def experts_of(directory: Path, index: int = 1, **choices: str) -> ExpertsMLP:
    mlp = network(directory, **choices).layers[index].mlp
    assert isinstance(mlp, ExpertsLayer)
    return mlp.experts


@pytest.mark.parametrize(
    "kind",
    [
        GPTQ,
        Kind("gptq", 3, 32, symmetric=True),
        Kind("gptq", 8, -1),
        Kind("gptq_v2", 4, 32, act_order=True),
        Kind("gptq", 2, 64, symmetric=True, act_order=True),
        Kind("awq", 4, 128),
        Kind("awq", 4, 32, symmetric=True),
        Kind("compressed-tensors", 4, 32, act_order=True),
        Kind("compressed-tensors", 4, 128, symmetric=True),
        Kind("compressed-tensors", 8, -1, symmetric=True),
    ],
    ids=str,
)
def test_quantized_experts_say_what_their_dense_twin_says(kind: Kind, tmp_path: Path) -> None:
    quantized, dense = write_models(tmp_path, kind, **QWEN3_MOE)
    assert tokens(served(quantized)) == tokens(served(dense))
    experts = experts_of(quantized)
    for weight, shape in ((experts.gate_up, (4, 256, 128)), (experts.down, (4, 128, 128))):
        assert isinstance(weight, StackedWeight)
        assert weight.shape == shape
        assert (weight.bits, weight.symmetric) == (kind.bits, kind.symmetric)
        assert (weight.permutation is not None) == (kind.act_order and kind.group_size != -1)


EXPERTS_ALONE: dict[str, tuple[eight_bits.Kind, Mapping[str, Any]]] = {
    "fp8": (BLOCKS, {"modules_to_not_convert": [".*self_attn"]}),
    "compressed-tensors": (
        eight_bits.Kind("compressed-tensors", "float", "block"), {"ignore": ["lm_head", "re:.*self_attn.*"]}
    ),
}  # fmt: skip


def in_blocks(name: str, directory: Path, **fields: Any) -> tuple[Path, Path]:
    """(a mixture whose experts are e4m3 blocks and whose other linears are dense, its dense twin)."""
    kind, rest = EXPERTS_ALONE[name]
    quantization = {**eight_bits.settings(kind), **rest}
    return eight_bits.write_models(
        directory, lambda layer: kind if "experts" in layer else None, quantization, **fields
    )


@pytest.mark.parametrize("name", EXPERTS_ALONE)
def test_experts_in_e4m3_blocks_say_what_their_dense_twin_says(name: str, tmp_path: Path) -> None:
    """In float32: their inputs stay as they are, and a code times a scale is rounded once in both."""
    quantized, dense = in_blocks(name, tmp_path, **{**QWEN3_MOE, "moe_intermediate_size": 256})
    llm = served(quantized)
    assert tokens(llm) == tokens(served(dense))
    assert set(llm.kernels) == set(kernel_axes(load_config(quantized), LIMITS))
    experts, stored = experts_of(quantized), load_file(dense / "model.safetensors")
    for weight, shape, scales in (
        (experts.gate_up, (4, 512, 128), (4, 4, 1)),
        (experts.down, (4, 128, 256), (4, 1, 2)),
    ):
        assert isinstance(weight, StackedScaledWeight)
        assert (weight.shape, tuple(weight.scales.shape)) == (shape, scales)
        assert all(part.untyped_storage().nbytes() == part.nbytes for _, part in weight.parts())  # nothing but it
    own = [stored[f"{EXPERT}.{part}.weight"] for part in ("gate_proj", "up_proj")]
    assert torch.equal(dequantize(experts.gate_up.expert(2)), torch.cat(own))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("variant", ["auto", "fp8_padded_tiles", "composed"])
def test_kernels_of_e4m3_blocks_compute_what_torch_does(variant: str, tmp_path: Path) -> None:
    fields = {**QWEN3_MOE, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    directory, _ = in_blocks("fp8", tmp_path, **fields)
    plain, mine = experts_of(directory, 0), experts_of(directory, 0, moe_mlp=variant)
    assert mine.moe_mlp.variant.name == variant
    generator = torch.Generator().manual_seed(0)
    x, counts = torch.randn((3, 128), generator=generator), torch.rand((3, 2), generator=generator)
    chosen = torch.tensor([[0, 3], [1, 0], [3, 2]], dtype=torch.int32)
    torch.testing.assert_close(mine(x, chosen, counts), plain(x, chosen, counts), rtol=1e-5, atol=1e-5)


def test_gates_and_ups_whose_last_block_is_not_full_are_refused(tmp_path: Path) -> None:
    """Down has them as inputs, which blocks have to fill."""
    fields = {**QWEN3_MOE, "moe_intermediate_size": 192}
    quantized, _ = write_models(tmp_path, GPTQ, eight_bits.settings(BLOCKS), **fields)
    with pytest.raises(ConfigError, match=r"experts\.0\.down_proj: its 192 inputs are no multiple of 128"):
        load_config(quantized)


def test_e4m3_downs_are_not_served_beside_dense_gates_and_ups(tmp_path: Path) -> None:
    listed = {**eight_bits.settings(BLOCKS), "modules_to_not_convert": [".*self_attn", r".*(gate|up)_proj"]}
    downs, _ = eight_bits.write_models(
        tmp_path, lambda name: BLOCKS if "experts" in name and "down" in name else None, listed, **QWEN3_MOE
    )
    message = (
        r"config\.json: model\.layers\.0\.mlp\.experts\.0\.down_proj is stored as float8_e4m3fn with a scale for "
        r"each block of 128 x 128, but model\.layers\.0\.mlp\.experts\.0\.gate_proj as dense; all experts of a layer "
        "must be stored in codes of one kind and size$"
    )
    with pytest.raises(ConfigError, match=message):
        load_config(downs)


WITH_ROUTERS = (*LINEARS, ".gate")


@pytest.mark.parametrize("mixture", [QWEN3_MOE, MIXTRAL], ids=lambda fields: fields["architectures"][0])
@pytest.mark.parametrize(
    "kind",
    [
        Kind("gptq", 4, 32), Kind("gptq_v2", 8, 64, act_order=True), Kind("awq", 4, 32),
        Kind("compressed-tensors", 4, 32), BLOCKS,
    ],
    ids=str,
)  # fmt: skip
def test_a_router_in_codes_is_decoded(kind: Any, mixture: Mapping[str, Any], tmp_path: Path) -> None:
    """GPTQModel, AutoRound and AutoAWQ have written some."""
    write: Any = eight_bits.write_models if isinstance(kind, eight_bits.Kind) else write_models
    settings_of: Any = eight_bits.settings if isinstance(kind, eight_bits.Kind) else settings
    attention = kind if isinstance(kind, Kind) else None  # that of 8-bit codes quantizes its inputs
    rest = {} if isinstance(kind, Kind) else {"modules_to_not_convert": [".*self_attn"]}
    quantized, dense = write(
        tmp_path,
        lambda name: attention if "self_attn" in name else kind,
        {**settings_of(kind), **rest},
        linears=WITH_ROUTERS,
        **{**mixture, "num_experts": 8},
    )
    block = "mlp" if mixture is QWEN3_MOE else "block_sparse_moe"
    router = f"model.layers.1.{block}.gate"
    stored, decoded = (load_file(one / "model.safetensors") for one in (quantized, dense))
    assert {name for name in stored if name.startswith(router)} != {f"{router}.weight"}
    mlp = network(quantized).layers[1].mlp
    assert isinstance(mlp, ExpertsLayer)
    assert torch.equal(mlp.router.weight, decoded[f"{router}.weight"])  # type: ignore[arg-type]
    llm = served(quantized)
    assert tokens(llm) == tokens(served(dense))
    assert set(llm.kernels) == set(kernel_axes(load_config(quantized), LIMITS))


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"modules_to_not_convert": ["mlp.gate"]}, r"tensor 'model\.layers\.0\.mlp\.gate\.weight' is missing"),
        ({}, r"tensor 'model\.layers\.0\.mlp\.gate\.scales' is missing"),
    ],
)
def test_a_router_in_codes_that_the_config_lacks_or_that_lack_scales_is_refused(
    listed: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    kind = Kind("awq", 4, 32)
    fields = {**QWEN3_MOE, "num_experts": 8}
    quantized, _ = write_models(tmp_path, kind, {**settings(kind), **listed}, linears=WITH_ROUTERS, **fields)
    if not listed:
        change(quantized, lambda tensors: tensors.__delitem__("model.layers.0.mlp.gate.scales"))
    with pytest.raises(WeightError, match=message):
        load(quantized, torch.float32)


@pytest.mark.parametrize("kind", [GPTQ, BLOCKS], ids=str)
def test_what_stands_beside_a_dense_router_is_unexpected(kind: Any, tmp_path: Path) -> None:
    write: Any = write_models if kind is GPTQ else eight_bits.write_models
    quantized, _ = write(tmp_path, kind, **QWEN3_MOE)
    change(
        quantized, lambda tensors: tensors.update({"model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(4)})
    )
    with pytest.raises(WeightError, match=r"unexpected tensor 'model\.layers\.0\.mlp\.gate\.e_score_correction_bias'"):
        load(quantized, torch.float32)


def test_a_router_in_codes_is_rounded_once(tmp_path: Path) -> None:
    """Its scales are no bfloat16."""
    quantized, dense = write_models(tmp_path, GPTQ, linears=WITH_ROUTERS, **{**QWEN3_MOE, "num_experts": 8})
    one, other = (load(directory, torch.bfloat16) for directory in (quantized, dense))
    for mine, theirs in zip(one.layers, other.layers, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(mine.mlp.router.weight, theirs.mlp.router.weight)


def modules_not_converted(*names: str) -> Mapping[str, Any]:
    return {**settings(Kind("awq", 4, 32)), "modules_to_not_convert": list(names)}


MIXED: dict[str, tuple[Callable[[str], Kind | None], Mapping[str, Any], Mapping[str, Any]]] = {
    "router listed": (lambda name: Kind("awq", 4, 32), modules_not_converted("mlp.gate"), QWEN3_MOE),
    "first layer's experts dense": (
        lambda name: None if "layers.0.mlp" in name else GPTQ,
        {**settings(GPTQ), "dynamic": {r"-:model\.layers\.0\.mlp": {}}},
        QWEN3_MOE,
    ),
    "attention dense": (
        lambda name: None if "self_attn" in name else GPTQ,
        {**settings(GPTQ), "dynamic": {r"-:.*self_attn": {}}},
        QWEN3_MOE,
    ),
    "a dense layer, quantized": (lambda name: GPTQ, settings(GPTQ), {**QWEN3_MOE, "mlp_only_layers": [0]}),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_differs_between_kinds_of_layers_is_mixed(name: str, tmp_path: Path) -> None:
    kind_of, quantization, fields = MIXED[name]
    quantized, dense = write_models(tmp_path, kind_of, quantization, **fields)
    llm = served(quantized)
    assert tokens(llm) == tokens(served(dense))
    assert set(llm.kernels) == set(kernel_axes(load_config(quantized), LIMITS))


@pytest.mark.parametrize(
    ("down", "stored"),
    [(None, "dense"), (Kind("gptq", 8, 32), "codes of 8 bits in groups of 32")],
)
def test_downs_that_are_stored_unlike_gates_and_ups_are_refused(down: Kind | None, stored: str, tmp_path: Path) -> None:
    rule = {r"-:.*down_proj": {}} if down is None else {r"+:.*down_proj": {"bits": down.bits}}
    quantized, _ = write_models(
        tmp_path,
        lambda name: down if name.endswith("down_proj") else GPTQ,
        {**settings(GPTQ), "dynamic": rule},
        **QWEN3_MOE,
    )
    message = (
        rf"config\.json: .*\.0\.down_proj is stored as {stored}, but .*\.0\.gate_proj as codes of 4 bits in groups of "
        "32; all experts of a layer must be stored in codes of one kind and size$"
    )
    with pytest.raises(ConfigError, match=message):
        load_config(quantized)


def test_downs_may_have_wider_groups_than_gates_and_ups(tmp_path: Path) -> None:
    quantized, dense = write_models(
        tmp_path,
        lambda name: Kind("gptq", 4, 64) if name.endswith("down_proj") else GPTQ,
        {**settings(GPTQ), "dynamic": {r"+:.*down_proj": {"group_size": 64}}},
        **QWEN3_MOE,
    )
    assert tokens(served(quantized)) == tokens(served(dense))


def test_those_of_mixtral_are_w1_w3_and_w2(tmp_path: Path) -> None:
    """Renamed, the experts of a Qwen3-MoE are Mixtral's."""
    quantized, _ = write_models(tmp_path / "a", GPTQ, **QWEN3_MOE)
    named = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    config = {**MIXTRAL, "quantization_config": settings(GPTQ)}
    renamed = {}
    for name, tensor in load_file(quantized / "model.safetensors").items():
        if not name.endswith(("q_norm.weight", "k_norm.weight")):
            for ours, theirs in named.items():
                name = name.replace(ours, theirs)
            renamed[name] = tensor
    other, _ = write_models(tmp_path / "b", GPTQ, **QWEN3_MOE)
    save_file(renamed, other / "model.safetensors")
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**raw, **config}))
    one, two = experts_of(quantized), experts_of(other)
    for mine, theirs in ((one.gate_up, two.gate_up), (one.down, two.down)):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine.parts(), theirs.parts(), strict=True))


def change(directory: Path, changed: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    changed(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_an_expert_without_an_order_stands_beside_those_with_one(tmp_path: Path) -> None:
    """An expert that calibration never reached keeps its inputs in order; and its zero-points may be in the middle."""
    quantized, _ = write_models(tmp_path, Kind("gptq_v2", 4, 32, act_order=True), **QWEN3_MOE)

    def unreached(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("gate_proj", "up_proj"):
            tensors[f"{EXPERT}.{part}.g_idx"] = torch.arange(128, dtype=torch.int32) // 32
            tensors[f"{EXPERT}.{part}.qzeros"].fill_(-0x77777778)

    before = experts_of(quantized).gate_up
    after = experts_of(change(quantized, unreached)).gate_up
    assert isinstance(before, StackedWeight)
    assert isinstance(after, StackedWeight)
    assert after.permutation is not None
    assert after.zeros is not None
    assert torch.equal(after.permutation[2], torch.arange(128, dtype=torch.int32))
    assert bool((after.zeros[2] == 8).all())
    assert torch.equal(after.permutation[3], before.permutation[3])  # type: ignore[index]


def test_experts_in_unlike_orders_are_refused(tmp_path: Path) -> None:
    quantized, _ = write_models(tmp_path, Kind("gptq", 4, 32, act_order=True), **QWEN3_MOE)

    def shuffled(tensors: dict[str, torch.Tensor]) -> None:
        order = tensors[f"{EXPERT}.up_proj.g_idx"]
        tensors[f"{EXPERT}.up_proj.g_idx"] = order.flip(0).contiguous()

    message = rf"^{tmp_path}/quantized: {EXPERT}\.up_proj and its gate differ: they are permuted"
    with pytest.raises(WeightError, match=message):
        load(change(quantized, shuffled), torch.float32)


@pytest.mark.parametrize("kind", [GPTQ, BLOCKS], ids=str)
def test_a_fault_in_an_expert_is_that_of_its_tensor_alone(kind: Any, tmp_path: Path) -> None:
    part = "qweight" if kind is GPTQ else "weight_scale_inv"
    write: Any = write_models if kind is GPTQ else eight_bits.write_models
    quantized, _ = write(tmp_path, kind, **QWEN3_MOE)
    change(quantized, lambda tensors: tensors.__delitem__(f"{EXPERT}.up_proj.{part}"))
    with pytest.raises(WeightError, match=rf"^{quantized}: tensor '{EXPERT}\.up_proj\.{part}' is missing from "):
        load(quantized, torch.float32)


SCHEMES = {
    Scheme(4, 32): "codes of 4 bits in groups of 32",
    Scheme(3, permuted=True): "codes of 3 bits in one group, in the order of activations",
    Scheme(4, 32, "e2m1"): "e2m1 codes of 4 bits in groups of 32",
    Scheme(3, coding="lookup", sparse=True): "table codes of 3 bits in one group, with outliers",
    ScaledScheme("int8"): "int8 with a scale for each output",
    ScaledScheme("float8_e4m3fn", static=True): "float8_e4m3fn with a scale for each output and one of the inputs",
    ScaledScheme("float8_e4m3fn", blocked=True): "float8_e4m3fn with a scale for each block of 128 x 128",
}


def test_a_scheme_is_described_by_all_that_it_has() -> None:
    assert {str(scheme): scheme for scheme in SCHEMES} == {text: scheme for scheme, text in SCHEMES.items()}


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "an expert in 8 bits": (
        {**settings(GPTQ), "dynamic": {r"+:.*experts\.2\.": {"bits": 8}}},
        r"layers\.0\.mlp\.experts\.2\.gate_proj is stored as codes of 8 bits in groups of 32, but "
        r"model\.layers\.0\.mlp\.experts\.0\.gate_proj as codes of 4 bits in groups of 32; .* must be stored alike$",
    ),
    "an expert dense": (
        {**settings(GPTQ), "dynamic": {r"-:.*experts\.3\.down": {}}},
        r"layers\.0\.mlp\.experts\.3\.down_proj is stored as dense, but .*experts\.0\.down_proj as codes of 4 ",
    ),
    "gates dense": (
        {**settings(Kind("awq", 4, 32)), "modules_to_not_convert": ["gate"]},
        r"experts\.0\.up_proj is stored as codes of 4 bits in groups of 32, but .*experts\.0\.gate_proj as dense; all ",
    ),
    **{
        str(kind): (
            eight_bits.settings(kind),
            r"experts\.0\.gate_proj: experts whose inputs are quantized too \(float8_e4m3fn\) are not supported",
        )
        for kind in eight_bits.KINDS
        if kind.codes == "float" and kind.scales != "block"
    },
    "int8": (
        eight_bits.settings(eight_bits.KINDS[0]),
        r"experts\.0\.gate_proj: experts whose inputs are quantized too",
    ),
    "squeezellm": (
        settings(Kind("squeezellm", 4)),
        r"experts\.0\.gate_proj: experts whose codes have a table or outliers are not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_experts_stored_unlike_or_in_other_ways_are_refused(name: str, tmp_path: Path) -> None:
    quantization, message = REFUSED[name]
    quantized, _ = write_models(tmp_path, GPTQ, quantization, **QWEN3_MOE)
    with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
        load_config(quantized)
