"""gpt-oss's experts in MXFP4: the numbers of transformers' own unpacking, its logits, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tmodel.formats.test_models import network
from tests.tmodel.packed import load
from tests.tmodel.test_parity import (
    GPT_OSS,
    LARGEST_RATIO,
    LENGTHS,
    SCHEDULES,
    YARN,
    Routing,
    assert_parity,
    chosen_experts,
    near_ties,
    packed_logits,
    random_model,
    random_sequences,
    transformers_logits,
)
from tkernels.quantized.stacked import StackedWeight, dequantize_experts, stack
from tkernels.quantized.weight import interleaved
from tmodel import ConfigError, WeightError, load_config
from tmodel.decoders.experts import ExpertsLayer
from tmodel.formats import MXFP4, parse_format
from tmodel.weights import Checkpoint
from tsched import LLM, SamplingParams

LAYER = "model.layers.1.mlp.experts"
PROJECTIONS = ("gate_up_proj", "down_proj")
PUBLISHED = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "eight, two": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "four, four, yarn": {"num_local_experts": 4, "num_experts_per_tok": 4, "rope_parameters": YARN},
    "sixteen, four, three layers": {"num_local_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 3},
}


def coded(shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random bytes of a projection [E, K, N], some of every exponent near that of its fan-in."""
    experts, inputs, outputs = shape
    exponents = torch.randint(120, 127, (experts, outputs, inputs // 32), generator=generator)
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator)
    return {"blocks": blocks.to(torch.uint8), "scales": exponents.to(torch.uint8)}


def write_model(directory: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A gpt-oss as random as those of the parity tests, its experts in MXFP4."""
    sizes = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 32, **SHAPES["eight, two"], **fields}
    random_model(directory, dtype, "GptOssForCausalLM", **sizes)
    index = directory / "model.safetensors.index.json"
    tensors = {name: one for file in directory.glob("*.safetensors") for name, one in load_file(file).items()}
    for file in (index, *directory.glob("*.safetensors")):
        file.unlink(missing_ok=True)
    generator = torch.Generator().manual_seed(1)
    for name in sorted(tensors):
        if name.endswith(PROJECTIONS):
            parts = coded(tuple(tensors.pop(name).shape), generator)
            tensors |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    # transformers has no kernels for it on a CPU, and unpacks where it is told to.
    change_config(directory, quantization_config={**PUBLISHED, "dequantize": True})
    return directory


def change_config(directory: Path, **fields: Any) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, **fields}))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def read(directory: Path, parts: dict[str, torch.Tensor], *size: int) -> StackedWeight:
    save_file({f"{LAYER}.down_proj_{part}": one for part, one in parts.items()}, directory / "model.safetensors")
    with Checkpoint(directory, device="cpu", dtype=torch.float32, prefix="model.") as checkpoint:
        weights = MXFP4().read_experts(checkpoint, f"{LAYER}.down_proj", *size)
        return stack(weights, size[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_byte_with_every_exponent_is_what_transformers_unpacks(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # 255 groups of each of 16 outputs: every exponent but NaN's. 16 outputs of 16 bytes: every byte, each 255 times.
    parts = {
        "scales": torch.arange(255, dtype=torch.uint8).expand(2, 16, 255).contiguous(),
        "blocks": torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(2, 16, 255, 16).contiguous(),
    }
    expected = convert_moe_packed_tensors(parts["blocks"], parts["scales"], dtype=dtype).transpose(1, 2)  # [E, N, K]
    weight = read(tmp_path, parts, 2, 16, 255 * 32)
    assert torch.equal(dequantize_experts(weight, dtype), expected)
    assert bool(expected.isinf().any())  # 6 * 2**127
    assert int((expected.abs() < 2.0**-126).sum()) > 0  # subnormal ones too


def test_what_is_read_is_written_bit_for_bit(tmp_path: Path) -> None:
    parts = coded((3, 64, 10), torch.Generator().manual_seed(0))
    weight = read(tmp_path, parts, 3, 10, 64)
    layer = f"{LAYER}.down_proj"
    for order in (lambda one: one, interleaved):
        encoded = [MXFP4().encode(layer, order(weight.expert(number))) for number in range(3)]
        for part, tensor in parts.items():
            assert torch.equal(torch.stack([one[part] for one in encoded]), tensor)
    with pytest.raises(ValueError, match="its scales are not all powers of two"):
        MXFP4().encode(layer, weight.expert(0).map_tensors(lambda part: part * 3))
    with pytest.raises(ValueError, match="the format keeps this layer dense"):
        MXFP4().encode("model.layers.0.self_attn.q_proj", weight.expert(0))


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    """3 shapes x 3 schedules x 128 rows, beside transformers' model of the same bytes unpacked."""
    directory = write_model(tmp_path, **SHAPES[shape])
    sequences, scores = random_sequences(LENGTHS), Routing()
    expected = transformers_logits(directory, sequences, torch.float32, scores=scores)
    assert len(expected) * len(SHAPES) * len(SCHEDULES) >= 1000
    near = near_ties(directory, scores, len(expected))
    model = load(directory, torch.float32)
    for schedule in SCHEDULES:
        assert_parity(packed_logits(model, sequences, torch.float32, schedule), expected, near)


def test_bfloat16_is_as_near_to_float64_as_transformers_is(tmp_path: Path) -> None:
    directory, sequences, scores = write_model(tmp_path, torch.bfloat16), random_sequences(LENGTHS), Routing()
    exact = transformers_logits(directory, sequences, torch.float64, scores=scores)
    experts = chosen_experts(directory, scores)

    def distance(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).square().mean().sqrt())

    theirs = distance(transformers_logits(directory, sequences, torch.bfloat16, experts=experts))
    model = load(directory, torch.bfloat16)
    for schedule in SCHEDULES:
        ours = distance(packed_logits(model, sequences, torch.bfloat16, schedule, experts=experts))
        assert ours <= LARGEST_RATIO * theirs


@pytest.mark.parametrize("variant", ["torch", "dequant_padded_tiles", "dequant_gemv", "composed"])
def test_every_variant_says_what_the_dense_twin_says(variant: str, tmp_path: Path) -> None:
    quantized, dense = write_model(tmp_path / "mxfp4"), write_model(tmp_path / "dense")
    experts = network(quantized).layers[1].mlp
    assert isinstance(experts, ExpertsLayer)
    assert isinstance(experts.experts.gate_up, StackedWeight)
    assert (experts.experts.gate_up.coding, experts.experts.gate_up.group_size) == ("e2m1", 32)

    def unpacked(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_blocks")]:
            layer = name.removesuffix("_blocks")
            blocks, scales = tensors.pop(name), tensors.pop(f"{layer}_scales")
            tensors[layer] = dequantize_experts(
                read(tmp_path, {"blocks": blocks, "scales": scales}, *blocks.shape[:2], 32 * blocks.shape[2])
            ).transpose(1, 2).contiguous()  # fmt: skip

    change_tensors(dense, unpacked)
    change_config(dense, quantization_config=None)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found = []
    for directory, choices in ((quantized, {"moe_mlp": variant}), (dense, {})):
        llm = LLM(directory, dtype="float32", device="cpu", kv_cache_bytes=2**20, max_num_seqs=4, kernels=choices)
        outputs = llm.generate([[1, 2, 3, 4, 5], [11]], params, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def shaped(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=torch.uint8)})


def filled(name: str, value: float, *place: int) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[name].__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (filled(f"{LAYER}.down_proj_scales", 255, 3, 5, 0), r"down_proj_scales' has a NaN \(255\) at \[3, 5, 0\]"),
        (lambda tensors: tensors.pop(f"{LAYER}.gate_up_proj_blocks"), r"gate_up_proj_blocks' is missing"),
        (lambda tensors: tensors.pop(f"{LAYER}.gate_up_proj_scales"), r"gate_up_proj_scales' is missing"),
        (lambda tensors: tensors.pop(f"{LAYER}.down_proj_bias"), r"down_proj_bias' is missing"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.router.weight"), r"mlp\.router\.weight' is missing"),
        (shaped(f"{LAYER}.down_proj_blocks", 7, 64, 1, 16),
         r"\[7, 64, 1, 16\], where \[E, N, K / 32, 16\] = \[8, 64, 1, 16\] is expected"),
        (lambda tensors: tensors.update({f"{LAYER}.down_proj": torch.ones(8, 32, 64)}),
         r"down_proj' is dense, but quantization_config says that the layer is not"),
        (filled("model.layers.0.self_attn.sinks", torch.inf, 1), r"self_attn\.sinks' has a NaN or \+inf; a sink must"),
        (filled("model.layers.0.self_attn.sinks", torch.nan, 1), r"self_attn\.sinks' has a NaN or \+inf"),
    ],
)  # fmt: skip
def test_damaged_weights_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path)
    change_tensors(directory, change)
    with pytest.raises(WeightError, match=message):
        load(directory, torch.float32)


def test_scales_that_a_dtype_does_not_hold_are_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    change_tensors(directory, filled(f"{LAYER}.down_proj_scales", 145, 0, 0, 0))
    load(directory, torch.float32)
    with pytest.raises(WeightError, match="scales or values beyond float16's range"):
        load(directory, torch.float16)


def test_a_head_without_a_sink_may_say_so(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    change_tensors(directory, filled("model.layers.0.self_attn.sinks", -torch.inf, 1))
    sequences = random_sequences(LENGTHS)
    found = packed_logits(load(directory, torch.float32), sequences, torch.float32, "in chunks")
    assert_parity(found, transformers_logits(directory, sequences, torch.float32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": {**PUBLISHED, "modules_to_not_convert": ["("]}}, "modules_to_not_convert.*'\\('"),
        ({"intermediate_size": 40}, r"experts\.down_proj: group_size 32 does not divide its 40 inputs"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
         r"gate_up_proj: experts that are stored in one tensor as .* not supported; mxfp4 is where"),
        ({"architectures": ["MixtralForCausalLM"], "layer_types": None},
         r"w1: experts that are stored one by one as .*e2m1.*not supported"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; gates are multiplied by 1.702 here"),
        ({"swiglu_limit": 0.0}, "swiglu_limit: "),
        ({"num_local_experts": 8, "num_experts": 4}, "num_experts is 4, but num_local_experts 8"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": None}, "sliding_window is not given"),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    change_config(directory, **fields)
    with pytest.raises(ConfigError, match=message):
        load_config(directory)


def test_settings_are_read_as_they_are_published() -> None:
    found = parse_format(PUBLISHED)
    assert isinstance(found, MXFP4)
    assert found.config() == PUBLISHED
    quantized = {
        name: found.scheme(name) is not None for name in (f"{LAYER}.down_proj", "lm_head", "model.layers.0.mlp.router")
    }
    assert quantized == {f"{LAYER}.down_proj": True, "lm_head": False, "model.layers.0.mlp.router": False}
    assert (
        parse_format({**PUBLISHED, "modules_to_not_convert": ["model.layers.1."]}).scheme(f"{LAYER}.down_proj") is None
    )
