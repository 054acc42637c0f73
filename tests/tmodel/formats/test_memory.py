"""What loading a quantized model takes: little more than the model, and each layer twice for a moment."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tkernels
import tmodel.linear_reader
from tests.tmodel.formats import by_hand, eight_bits
from tests.tmodel.formats.by_hand import Kind, as_torch, settings
from tests.tmodel.formats.models import SHAPE, write, write_models
from tests.tmodel.formats.test_mxfp4 import write_model as write_mxfp4
from tests.tmodel.mixtures import MIXTURE, SMALL
from tests.tmodel.packed import load
from tkernels import PrepareReport, Variant
from tkernels.quantized.weight import QuantizedWeight
from tkernels.variant import as_it_is
from tmodel import PRESETS
from tmodel.random_weights import write_random

LOAD = """
import json, sys
import tkernels, tmodel, torch

def kib(name):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1])

def load(directory, choices):
    config = tmodel.load_config(directory)
    limits = tmodel.Limits(max_num_tokens=64, max_num_seqs=4, max_model_len=64, block_size=16, num_blocks=16)
    axes = tmodel.kernel_axes(config, limits)
    kernels = tkernels.select(json.loads(choices), device="cpu", dtype=torch.float16, axes=axes)
    return tmodel.load_model(directory, config, kernels, device="cpu", dtype=torch.float16)

small, large, choices = sys.argv[1:]
load(small, choices)  # whose peak is code that is mapped when it is first called
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again from here
before = kib("VmRSS")
model = load(large, choices)
print(1024 * (kib("VmHWM") - before), model.weight_bytes)
"""


Parts = Callable[[int, int], dict[str, torch.Tensor]]
"""(outputs, inputs) -> a layer's tensors."""


def write_wide(directory: Path, quantization: Mapping[str, Any], parts: Parts, experts: int = 0) -> Path:
    """A model of 50 MB and more whose layers are each a small part of it: of 25 MB, one and its copy decide by luck."""
    config = {**SHAPE, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 48, "head_dim": 128}
    config |= {"torch_dtype": "float16", "quantization_config": quantization}
    names = {"q_proj": (512, 512), "k_proj": (256, 512), "v_proj": (256, 512), "o_proj": (512, 512)}
    width = 128 if experts else 1536
    mlp = {"gate_proj": (width, 512), "up_proj": (width, 512), "down_proj": (512, width)}
    if experts:
        config |= {**MIXTURE, "num_experts": experts, "moe_intermediate_size": width, "num_hidden_layers": 48}
        mlp = {f"experts.{i}.{name}": shape for i in range(experts) for name, shape in mlp.items()}
    tensors = {name: torch.ones(40, 512).half() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(512).half()
    for index in range(48):
        prefix = f"model.layers.{index}"
        if experts:
            tensors[f"{prefix}.mlp.gate.weight"] = torch.ones(experts, 512).half()
        for name, width in (("input_layernorm", 512), ("post_attention_layernorm", 512),
                            ("self_attn.q_norm", 128), ("self_attn.k_norm", 128)):  # fmt: skip
            tensors[f"{prefix}.{name}.weight"] = torch.ones(width).half()
        for name, (outputs, inputs) in (names | mlp).items():
            layer = f"{prefix}.{'mlp' if name in mlp else 'self_attn'}.{name}"
            tensors |= {f"{layer}.{part}": tensor.clone() for part, tensor in parts(outputs, inputs).items()}
    return write(directory, config, tensors)


def four_bit_parts(kind: Kind) -> Parts:
    rng = np.random.default_rng(0)
    return cache(lambda outputs, inputs: as_torch(by_hand.linear(kind, outputs, inputs, rng)[0]))


def eight_bit_parts(kind: eight_bits.Kind) -> Parts:
    rng = np.random.default_rng(0)
    return cache(lambda outputs, inputs: eight_bits.linear(kind, outputs, inputs, rng)[0])


def assert_peak(small: Path, large: Path, choices: Mapping[str, str]) -> None:
    """Loading takes less than 1.3 times the checkpoint, and what is kept is about as large as it: SqueezeLLM's outliers
    are float32 there and float16 here.
    """
    on_disk = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    command = [sys.executable, "-c", LOAD, str(small), str(large), json.dumps(choices)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, kept = map(int, done.stdout.split())
    print(f"{on_disk / 1e6:.0f} MB on disk, {kept / on_disk:.2f} of it kept, {peak / on_disk:.2f} at the peak")
    assert 0.8 * on_disk < kept < peak < 1.3 * on_disk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("auto", Kind("gptq", 4, 128)),
        ("torch", Kind("gptq", 4, 128, act_order=True)),
        # The worst of all: zero-points of 2 bits become 16, one for 32 codes of 2, and codes change their places.
        ("auto", Kind("gptq", 2, 32, act_order=True)),
        ("auto", Kind("gptq", 3, 32, act_order=True)),
    ],
    ids=str,
)
def test_the_host_holds_less_than_a_third_more_than_the_checkpoint(variant: str, kind: Kind, tmp_path: Path) -> None:
    small, _ = write_models(tmp_path, kind)
    large = write_wide(tmp_path / "large", settings(kind), four_bit_parts(kind))
    assert_peak(small, large, {"dequant_gemm": variant})


def hardest_kinds() -> list[Kind]:
    """Of every method the kind with the most scales and zero-points for a code's bits, codes out of order."""

    def hardness(kind: Kind) -> tuple[int, bool, bool, int]:
        return -kind.bits, kind.act_order, not kind.symmetric, -(kind.group_size % 2**30)

    methods = {kind.method for kind in by_hand.KINDS}
    return [max((kind for kind in by_hand.KINDS if kind.method == one), key=hardness) for one in sorted(methods)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", hardest_kinds(), ids=str)
def test_so_does_every_method_of_packed_codes(kind: Kind, tmp_path: Path) -> None:
    small, _ = write_models(tmp_path, kind)
    assert_peak(small, write_wide(tmp_path / "large", settings(kind), four_bit_parts(kind)), {})


@pytest.mark.slow
@pytest.mark.parametrize("kind", eight_bits.KINDS, ids=str)
def test_so_does_every_kind_of_8_bit_codes(kind: eight_bits.Kind, tmp_path: Path) -> None:
    small, _ = eight_bits.write_models(tmp_path, kind)
    assert_peak(small, write_wide(tmp_path / "large", eight_bits.settings(kind), eight_bit_parts(kind)), {})


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "tied"), list(zip(PRESETS, cycle([True, False]), strict=False)))
def test_so_does_a_dense_model_of_every_architecture(preset: str, tied: bool, tmp_path: Path) -> None:
    """Two fifths of it are the embedding, so that a copy of that, or of a head, would show."""
    small = {**PRESETS[preset].config, "tie_word_embeddings": tied}
    wide = {"vocab_size": 40_000, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
    large = {**small, **wide, **{"n_embd": 512, "n_layer": 10}}
    for name, shape in (("small", small), ("large", large)):
        (tmp_path / name).mkdir()
        write_random(shape, tmp_path / name, 0)
    assert_peak(tmp_path / "small", tmp_path / "large", {})


EXPERTS = ("GptOssForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM")
PREPARING = [
    variant.name
    for variant in tkernels.OPS["moe_mlp"].variants.values()
    if variant.kind == "triton" and variant.prepare is not as_it_is
]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", EXPERTS)
def test_so_does_a_dense_mixture_of_experts(architecture: str, tmp_path: Path) -> None:
    """A layer is a twelfth of it, nine tenths of which are experts."""
    small = {**SMALL, "architectures": [architecture], "head_dim": 4, "hidden_size": 16}
    wide = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 12, "num_experts": 16, "num_experts_per_tok": 2}
    large = {**small, **wide, "intermediate_size": 256, "moe_intermediate_size": 256}
    for name, shape in (("small", {**small, "head_dim": 16, "hidden_size": 64}), ("large", large)):
        (tmp_path / name).mkdir()
        write_random(shape, tmp_path / name, 0)
    assert_peak(tmp_path / "small", tmp_path / "large", {})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["torch", *PREPARING])
@pytest.mark.parametrize("kind", [Kind("gptq", 4, 128), Kind("gptq", 4, 32, act_order=True)], ids=str)
def test_so_does_a_quantized_mixture_of_experts(kind: Kind, variant: str, tmp_path: Path) -> None:
    small, _ = write_models(tmp_path, kind, **MIXTURE | {"moe_intermediate_size": 128})
    large = write_wide(tmp_path / "large", settings(kind), four_bit_parts(kind), experts=16)
    assert_peak(small, large, {"moe_mlp": variant})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["torch", "auto"])
def test_so_does_a_mixture_of_experts_in_e4m3_blocks(variant: str, tmp_path: Path) -> None:
    kind = eight_bits.Kind("fp8", "float", "block")
    small, _ = eight_bits.write_models(tmp_path, kind, **MIXTURE | {"moe_intermediate_size": 128})
    large = write_wide(tmp_path / "large", eight_bits.settings(kind), eight_bit_parts(kind), experts=16)
    assert_peak(small, large, {"moe_mlp": variant})


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["torch", "dequant_padded_tiles"])
def test_so_does_a_mixture_in_mxfp4(variant: str, tmp_path: Path) -> None:
    """A layer is a twelfth of it, nine tenths of which are experts."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 16, "num_hidden_layers": 12}
    small = write_mxfp4(tmp_path / "small", torch.float16)
    assert_peak(small, write_mxfp4(tmp_path / "large", torch.float16, **wide), {"moe_mlp": variant})


def test_no_more_than_one_shape_is_held_in_two_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _ = write_models(tmp_path, Kind("gptq", 4, 32), num_hidden_layers=3)
    alive: list[int] = []
    prepare = tmodel.linear_reader.prepared

    def sequential() -> list[QuantizedWeight]:
        objects = [found for found in gc.get_objects() if type(found) is QuantizedWeight]
        return [found for found in objects if found.order == "sequential"]

    others = sequential()  # what a test before this one keeps

    def observed(variant: Variant, weight: Any) -> tuple[Any, PrepareReport]:
        result = prepare(variant, weight)
        alive.append(sum(all(found is not other for other in others) for found in sequential()))
        return result

    monkeypatch.setattr(tmodel.linear_reader, "prepared", observed)
    load(quantized, torch.float32, {"dequant_gemm": "auto"})
    # What query, key and value, or gate and up, were put together to, or a layer alone, with which nothing is put.
    assert alive == [1, 1, 1, 1] * 3
