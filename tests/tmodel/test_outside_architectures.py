"""Architectures that join from outside the tree: transformers' tokens, quantized too, and nothing else changes."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tmodel.quantizers.test_layers import layers_of
from tmodel import ArchitectureError, ConfigError, architectures_with, known_architectures, load_config
from tmodel.outside import prepare_imports
from tmodel.quantizers import METHODS
from tmodel.quantizers.awq import fold_scales
from tmodel.quantizers.calibration import collect_inputs, forward
from tmodel.quantizers.checkpoint import choose_calibration_windows, plan_job, quantize_checkpoint
from tmodel.quantizers.layers import layer_groups
from tmodel.quantizers.method import Layer
from tmodel.transformers_models import new_transformers_model
from tsched import LLM, SamplingParams

OUTSIDE = Path(__file__).parent / "outside"
SEED_OSS = (OUTSIDE / "seed_oss.py").read_text()
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "initializer_range": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "seed-oss": {
        "architectures": ["SeedOssForCausalLM"], **SIZES, "head_dim": 16, "num_key_value_heads": 2,
        "attention_bias": False,
    },
    "seed-oss-biased": {
        "architectures": ["SeedOssForCausalLM"], **SIZES, "head_dim": 32, "num_key_value_heads": 4,
        "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "gpt-neox": {"architectures": ["GPTNeoXForCausalLM"], **SIZES, "rotary_pct": 0.5},
}  # fmt: skip
PROMPTS = [[(7 * i + 3 * j) % 97 for j in range(length)] for i, length in enumerate((1, 9, 17, 33))]
NUM_TOKENS = 24


def save_random(name: str, directory: Path) -> Any:
    """transformers' model of MODELS, in float32, as it saves it; with biases that are not 0."""
    torch.manual_seed(0)
    model = new_transformers_model(MODELS[name]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return model


def greedy_tokens(directory: Path, **options: Any) -> list[list[int]]:
    llm = LLM(directory, architectures_from=[OUTSIDE], device="cpu", max_num_batched_tokens=32, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


def transformers_tokens(model: Any) -> list[list[int]]:
    tokens = []
    for prompt in PROMPTS:
        row = torch.tensor([prompt])
        made = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=NUM_TOKENS, do_sample=False)
        tokens.append(made[0, len(prompt) :].tolist())
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_random(name, tmp_path)
    expected = transformers_tokens(model)
    assert len({token for tokens in expected for token in tokens}) > 20, "a model that repeats itself proves little"
    assert greedy_tokens(tmp_path) == expected


@pytest.mark.parametrize("name", MODELS)
def test_the_tensors_are_those_that_transformers_saves(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    saved = {tensor: tuple(value.shape) for tensor, value in load_file(tmp_path / "model.safetensors").items()}
    assert dict(load_config(tmp_path, architectures_with([OUTSIDE])).tensors()) == saved


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", ["seed-oss", "gpt-neox"])
def test_they_are_quantized_and_served_so(name: str, method: str, tmp_path: Path) -> None:
    """At the most bits of each method, the quantized model's log-probabilities stay near the dense one's."""
    dense, out = tmp_path / "dense", tmp_path / "out"
    save_random(name, dense)
    bits = max(METHODS[method].bits)
    job = plan_job(dense, METHODS[method], bits, 32 if METHODS[method].grouped else -1, architectures_with([OUTSIDE]))
    tokens = torch.randint(97, (40 * 24,), generator=torch.Generator().manual_seed(0))
    steps: list[str] = []
    quantize_checkpoint(
        dataclasses.replace(job, windows=choose_calibration_windows(job.config, tokens, 24)), out, steps.append
    )
    assert len(steps) == job.num_steps
    config = load_config(out, architectures_with([OUTSIDE]))
    assert config.quantization is not None
    layers = [shape for shape in config.linears() if shape.names[0] != "lm_head"]
    assert all(None not in config.quantization.schemes(shape) for shape in layers)
    exact, near = (likelihoods(directory) for directory in (dense, out))
    # Inputs of 8 bits, whose largest are far above the rest in such a model, cost about what weights of 4 do.
    most = 0.1 if bits == 8 and method not in ("smoothquant", "fp8") else 1.0
    assert 0 < (near - exact).abs().mean() < most, "not quantized, or a wrong model"


def likelihoods(directory: Path) -> torch.Tensor:
    """Log-probabilities of each prompt's next token, for all of the vocabulary."""
    llm = LLM(directory, architectures_from=[OUTSIDE], device="cpu")
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, logprobs=97, ignore_eos=True))
    found = [output.outputs[0].logprobs for output in outputs]
    return torch.tensor([[place[0][token].logprob for token in range(97)] for place in found if place is not None])


@pytest.mark.parametrize("name", ["seed-oss-biased", "gpt-neox"])
def test_awq_folds_scales_into_what_feeds_each_linear(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    layers, (weights, _) = layers_of(tmp_path, torch.float32, 24, architectures_with([OUTSIDE]))
    groups = layer_groups(layers.config, 0)
    hidden = torch.randn((4, 24, 64), generator=torch.Generator().manual_seed(0))
    layer = Layer(0, groups, weights, torch.float32, layers, hidden)
    made, changed, scales = fold_scales(layer, collect_inputs(layers, weights, 0, hidden), 4, 32)
    expected = forward(layers, weights, 0, hidden)
    torch.testing.assert_close(forward(layers, made, 0, hidden), expected, rtol=1e-4, atol=1e-4)
    moved = [not torch.equal(one, torch.ones_like(one)) for one in scales]
    assert moved == [group.fed_by is not None for group in groups]
    assert all(torch.equal(made[name], tensor) for name, tensor in changed.items())


def test_the_house_knows_them_only_where_it_is_told_to(tmp_path: Path) -> None:
    save_random("seed-oss", tmp_path)
    before = dict(known_architectures())
    joined = architectures_with([OUTSIDE])
    assert set(joined) == {*before, "SeedOssForCausalLM", "GPTNeoXForCausalLM"}
    assert dict(known_architectures()) == before
    with pytest.raises(TypeError):
        joined["other"] = joined["SeedOssForCausalLM"]  # type: ignore[index]
    with pytest.raises(ConfigError, match="unknown architecture 'SeedOssForCausalLM'; known are: .*Qwen3"):
        LLM(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace("SeedOssForCausalLM", "SedOssForCausalLM")
    )
    with pytest.raises(
        ConfigError, match="unknown architecture 'SedOssForCausalLM'.*did you mean 'SeedOssForCausalLM'"
    ):
        LLM(tmp_path, device="cpu", architectures_from=[OUTSIDE])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"one.py": "1 / 0"}, r"one\.py:1: cannot be imported: ZeroDivisionError"),
        ({"one.py": "raise SystemExit(3)"}, r"one\.py:1: cannot be imported: SystemExit: 3"),
        ({"one.py": "x = 1"}, r"one\.py: must define ARCHITECTURE"),
        ({"_part.py": "x = 1"}, "holds no architecture"),
        (
            {"one.py": SEED_OSS, "two.py": SEED_OSS},
            r"two\.py: declares SeedOssForCausalLM, which .*one\.py declares too",
        ),
        (
            {"qwen3.py": "from tmodel.architectures.qwen3 import ARCHITECTURE"},
            r"qwen3\.py: declares Qwen3ForCausalLM, which .*architectures/qwen3\.py declares too",
        ),
    ],
)
def test_a_broken_folder_is_refused_by_its_file(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ArchitectureError, match=message):
        architectures_with([tmp_path])
    told: list[tuple[int, str, str]] = []
    asked = {"tasks": [[str(tmp_path)]], "seconds": 60.0}
    prepare_imports(None)(asked)(told.append)  # as the process does that imports them first
    (_, kind, said), (_, last, _) = told
    assert (kind, last) == ("fault", "ended")
    assert re.search(message, said)
    with pytest.raises(ArchitectureError, match="architectures_from: .*nowhere is not a folder"):
        architectures_with([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="architectures_from must be a list of folders, got 'here'"):
        LLM("tiny", architectures_from="here")
