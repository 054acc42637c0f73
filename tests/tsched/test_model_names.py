"""A model's name: a directory, else a trained preset, else a hub id; random weights only where they are asked for."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tmodel.model_names
import tsched.execution.placement
from tests.tmodel.conftest import write_checkpoint as write_checkpoint  # the fixture
from tmodel import RANDOM_PRESETS, ConfigError, find_model, load_config
from tsched import LLM, SamplingParams

SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rope_theta": 1e6,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture
def directory(write_checkpoint: Any) -> Path:
    path: Path = write_checkpoint()
    return path


@pytest.fixture
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(preset: str) -> Path:
        raise AssertionError(f"{preset} is made")

    monkeypatch.setattr(tmodel.model_names, "preset_path", refuse)


@pytest.mark.usefixtures("_nothing_is_trained")
@pytest.mark.parametrize("name", ["tiny", "random:Qwen3-0.6B", "Qwen/Qwen3-0.6B"])
def test_a_path_beats_everything_else(
    name: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(directory, tmp_path / name)
    plan = find_model(name)
    assert plan.weights == Path(name)
    assert plan.config == load_config(directory)
    assert LLM(name, device="cpu", kv_cache_bytes=10**6).directory == Path(name)


@pytest.mark.usefixtures("_nothing_is_trained")
def test_a_trained_preset_is_known_before_it_is_trained() -> None:
    plan = find_model("tiny")
    assert (plan.name, plan.weights, plan.random_weights, plan.config.vocab_size) == ("tiny", None, 0, 1024)
    with pytest.raises(AssertionError, match="tiny is made"):
        plan.directory()


@pytest.mark.usefixtures("_nothing_is_trained")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 10**6}, "from 1 to 1024"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes is 100"),
        ({"kernels": {"swiglu": "fusd"}}, "did you mean 'fused'"),
    ],
)
def test_llm_refuses_before_a_preset_is_trained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("tiny", device="cpu", **options)


def test_llm_serves_a_trained_preset_by_its_name(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmodel.model_names, "preset_path", {"tiny": directory}.__getitem__)
    monkeypatch.setattr(tmodel.model_names, "parse_config", lambda config: load_config(directory))
    (output,) = LLM("tiny", device="cpu", kv_cache_bytes=10**6).generate([[1, 2, 3]], GREEDY)
    (expected,) = LLM(directory, device="cpu", kv_cache_bytes=10**6).generate([[1, 2, 3]], GREEDY)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_random_weights_are_asked_for_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(RANDOM_PRESETS, "small", SMALL)
    plan = find_model("random:small")
    assert plan.weights is None
    assert plan.random_weights > 300 * 32
    (output,) = LLM("random:small", device="cpu", kv_cache_bytes=10**6).generate([[1, 2, 3]], GREEDY)
    assert len(output.outputs[0].token_ids) == 3
    assert (plan.directory() / "model.safetensors.index.json").exists()
    with pytest.raises(ConfigError, match="did you mean 'random:small'"):
        find_model("small")
    with pytest.raises(ConfigError, match="unknown model 'random:smal': there is .*; did you mean 'random:small'"):
        find_model("random:smal")
    with pytest.raises(ConfigError, match=r"'random:tiny': tiny is trained; its name alone .*\{preset: tiny\}"):
        find_model("random:tiny")


@pytest.mark.usefixtures("_nothing_is_trained")
def test_random_weights_that_do_not_fit_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tsched.execution.placement, "device_memory", lambda device: (8 * 10**9, 0))
    needed = "Qwen3-4B: 4.02 billion random weights take 16.1 GB as float32, this machine has 8.0 GB"
    with pytest.raises(ValueError, match=f"^{re.escape(needed)}$"):
        LLM("random:Qwen3-4B", device="cpu", dtype="float32")
    with pytest.raises(AssertionError, match="Qwen3-0.6B is made"):  # it fits
        LLM("random:Qwen3-0.6B", device="cpu", dtype="float32", kernels={})


def test_sequences_that_no_machine_could_hold_are_refused_with_the_numbers(
    write_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest that a config.json may promise; what is asked for by name may be shorter."""
    monkeypatch.setattr(tsched.execution.placement, "device_memory", lambda device: (24 * 10**9, 0))
    directory = write_checkpoint(max_position_embeddings=2**24)
    needed = (
        "max_model_len is 16777216: the tokens of max_num_seqs=256 such sequences take 34.4 GB, this machine has 24.0"
    )
    with pytest.raises(ValueError, match=needed):
        LLM(directory, device="cpu", kv_cache_bytes=10**6)


def test_what_is_nowhere_says_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").touch()
    for name, words in (
        ("tinny", ["no directory", "no trained preset", "no hub id", "did you mean 'tiny'?"]),
        ("Qwen3-0.6B", ["no directory", "no trained preset", "no hub id", "did you mean 'random:Qwen3-0.6B'?"]),
        ("/a/b/c", ["no directory /a/b/c", "no trained preset", "no hub id"]),
        ("weights.bin", ["is a file"]),
    ):
        with pytest.raises(ConfigError) as caught:
            LLM(name, device="cpu")
        places = [str(caught.value).index(word) for word in words]
        assert places == sorted(places)
        assert repr(name) in str(caught.value)
    with pytest.raises(ConfigError, match="is not a directory"):
        LLM(tmp_path / "tiny", device="cpu")
    for name in ("a" * 5000, Path("a" * 5000)):
        with pytest.raises(ConfigError, match=r"^model 'aaa.*': File name too long$"):
            LLM(name, device="cpu")
    for wrong in (5, None, b"tiny", ""):
        with pytest.raises(ValueError, match=f"^model must be a name or a path, got {wrong!r}$"):
            LLM(wrong, device="cpu")  # type: ignore[arg-type]


def test_a_hub_id_is_found_in_the_local_cache_without_a_network(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError) as caught:
        find_model("someone/model")
    places = [str(caught.value).index(word) for word in ("no directory", "no trained preset", "local cache")]
    assert places == sorted(places)
    cached, commit = tmp_path / "hub" / "models--someone--model", "0" * 40
    shutil.copytree(directory, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    plan = find_model("someone/model")
    assert (plan.name, plan.config, plan.weights) == ("someone/model", load_config(directory), None)
    llm = LLM("someone/model", device="cpu", kv_cache_bytes=10**6)
    assert llm.directory == plan.directory() == cached / "snapshots" / commit
    assert llm.dtype == torch.float32
