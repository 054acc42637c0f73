"""Random weights of a published shape: the real sizes, a checkpoint that everybody loads, the same everywhere."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tkernels
from tmodel import RANDOM_PRESETS, Limits, kernel_axes, load_config, load_model, make_random_model, preset_path
from tmodel.architectures.qwen3 import Qwen3Config
from tmodel.fields import RotaryConfig
from tmodel.random_weights import num_parameters, random_config, write_random
from tmodel.rotary import Llama3Rope

SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rope_theta": 1e6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen2.5-0.5B", 494_032_768),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Mixtral-8x7B", 46_702_792_704),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_the_sizes_are_the_published_ones(name: str, parameters: int) -> None:
    assert num_parameters(RANDOM_PRESETS[name]) == parameters
    assert random_config(RANDOM_PRESETS[name]).eos_token_ids == ()


def test_the_fields_are_the_published_ones() -> None:
    config = random_config(RANDOM_PRESETS["Qwen3-4B"])
    assert isinstance(config.fields, Qwen3Config)
    assert (config.head_dim, config.num_kv_heads, config.vocab_size) == (128, 8, 151936)
    assert config.fields.rope_parameters.rope_theta == 1e6
    assert config.fields.tie_word_embeddings
    assert random_config(RANDOM_PRESETS["Mistral-7B-v0.1"]).windows == (4096,) * 32
    assert random_config(RANDOM_PRESETS["Qwen2.5-0.5B"]).windows == (None,) * 24
    llama = random_config(RANDOM_PRESETS["Llama-3.1-8B"])
    assert isinstance(llama.fields, RotaryConfig)
    assert llama.fields.rope_parameters == Llama3Rope(
        rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_the_index_says_where_each_tensor_is_and_how_much_there_is(tmp_path: Path) -> None:
    write_random(SMALL, tmp_path, 0)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file) for file in tmp_path.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    nbytes = sum(tensor.nbytes for tensors in stored.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_loads_here_and_in_transformers(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    shape = {**SMALL, "tie_word_embeddings": tied}
    monkeypatch.setitem(RANDOM_PRESETS, "small", shape)
    make_random_model("small", tmp_path / "one", seed=3)
    make_random_model("small", tmp_path / "two", seed=3)
    make_random_model("small", tmp_path / "other", seed=4)
    config = load_config(tmp_path / "one")
    assert config == random_config(shape)
    assert config.dtype == torch.bfloat16
    axes = kernel_axes(config, Limits(max_num_tokens=8, max_num_seqs=2, max_model_len=16, block_size=16, num_blocks=2))
    kernels = tkernels.select({}, device=torch.device("cpu"), dtype=torch.float32, axes=axes)
    load_model(tmp_path / "one", config, kernels, device="cpu", dtype=torch.float32)  # every tensor is asked for
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == num_parameters(shape)
    files = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    assert len(files) == 3
    for file in files:
        one, two, other = (load_file(tmp_path / folder / file) for folder in ("one", "two", "other"))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert any(not torch.equal(one[name], other[name]) for name in one)
        for name, tensor in one.items():
            assert torch.equal(theirs.state_dict()[name], tensor.float())
            assert tensor.ndim == 1 or 0.01 < tensor.float().std() < 0.03


def test_a_random_preset_is_made_once_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(RANDOM_PRESETS, "small", SMALL)
    first = preset_path("small")
    written = (first / "config.json").stat().st_mtime_ns
    assert preset_path("small") == first
    assert (first / "config.json").stat().st_mtime_ns == written
    assert first.parent == tmp_path / "tkernels"
    monkeypatch.setitem(RANDOM_PRESETS, "small", {**SMALL, "hidden_size": 48})
    assert preset_path("small") != first
