"""Outside architectures in an experiment's YAML and on the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app
from experiments.document import ExperimentError
from experiments.simulation.shapes import find_shape
from tests.experiments.planning.test_plan import MakePlan
from tests.tmodel.test_outside_architectures import MODELS, OUTSIDE, SEED_OSS
from tmodel import PRESETS, RANDOM_PRESETS, find_model, kv_bytes_per_block
from tmodel.train import train_tokenizer
from tmodel.transformers_models import new_transformers_model
from tsched import LLM

TRACE = "synthetic:8"


def tk(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a byte-level tokenizer."""
    directory = tmp_path_factory.mktemp("seed-oss")
    torch.manual_seed(0)
    new_transformers_model(MODELS["seed-oss"], vocab_size=300).save_pretrained(directory)
    train_tokenizer(["def f(x): return x"], 300).save_pretrained(directory)
    return directory


def test_a_yaml_names_folders_of_architectures(plan: MakePlan, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(OUTSIDE)
    workload = {"kind": "synthetic", "num_requests": 2, "input_len": 4, "output_len": 3}
    keys: dict[str, Any] = {"model": {"path": str(model)}, "workload": workload}
    with pytest.raises(ExperimentError, match="unknown architecture 'SeedOssForCausalLM'; known are: .*Qwen3"):
        plan(**keys)
    made = plan(**keys, architectures_from=["mine"])
    assert made.model is not None
    assert made.model.config.architecture.name == "SeedOssForCausalLM"
    assert made.architecture_folders == (OUTSIDE,)
    with pytest.raises(ExperimentError, match=r"architectures_from\[0\].*nowhere is not a folder"):
        plan(**keys, architectures_from=["nowhere"])
    (tmp_path / "broken").mkdir()
    for text, reason in (
        ("1 / 0", r"one\.py:1: cannot be imported: ZeroDivisionError"),
        ("import os; os._exit(3)", r"broken: cannot be imported: .*3"),
    ):
        (tmp_path / "broken" / "one.py").write_text(text)
        with pytest.raises(ExperimentError, match=rf"architectures_from.*{reason}"):
            plan(**keys, architectures_from=["broken"])


@pytest.mark.slow
def test_an_experiment_serves_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "seed_oss.py").write_text(SEED_OSS)
    experiment = {
        "name": "outside",
        "model": {"path": str(model)},
        "architectures_from": ["mine"],
        "device": "cpu",
        "workload": {"kind": "synthetic", "num_requests": 2, "input_len": 4, "output_len": 3},
        "peers": ["without_kv_cache"],
        "quantization": {
            "methods": {"rtn": {"bits": 8, "group_size": 32}, "gptq": {"bits": 4, "group_size": 32}},
            "window": 16,
            "max_tokens": 32,
        },
    }
    (tmp_path / "a.yaml").write_text(json.dumps(experiment))
    tk("run", "a.yaml")
    (results,) = {file.resolve() for file in tmp_path.glob("runs/*/results.jsonl")}
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    by_stage = {row["stage"]: row for row in rows}
    assert {row["stage"]: row["status"] for row in rows if row["status"] != "ok"} == {}
    assert {"engine", "peers", "quantization"} <= set(by_stage)


def test_commands_take_folders_of_architectures(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    flag = ("--architectures-from", OUTSIDE)
    (row,) = json.loads(tk("simulate", "--trace", TRACE, "--policy", "none", "--model", model, "--json", *flag).stdout)
    assert row["requests"] == 8
    tk("quantize", model, tmp_path / "out", "--method", "rtn", "--bits", 8, "--group-size", 32, *flag)
    assert (tmp_path / "out" / "config.json").exists()
    for arguments in (
        ("simulate", "--trace", TRACE, "--model", model),
        ("quantize", model, tmp_path / "other", "--method", "rtn", "--bits", 8),
        ("generate", "--model", model, "--prompt", "a"),
    ):
        refused = CliRunner().invoke(app, [str(one) for one in arguments])
        assert refused.exit_code != 0
        assert "unknown architecture 'SeedOssForCausalLM'" in refused.stderr
        wrong = CliRunner().invoke(app, [str(one) for one in (*arguments, "--architectures-from", tmp_path / "none")])
        assert wrong.exit_code != 0
        assert "none is not a folder" in wrong.stderr
    tk("generate", "--model", model, "--prompt", "a", "--max-tokens", 2, *flag)
    text.write_text("def f(x): return x\n" * 20)
    found = json.loads(
        tk("eval", "--model", tmp_path / "out", "--reference", model, "--text", text, "--json", *flag).stdout
    )
    assert 0 < found["kl"] < 0.1
    refused = CliRunner().invoke(app, ["eval", "--model", str(model), "--text", str(text)])
    assert "unknown architecture 'SeedOssForCausalLM'" in refused.stderr


def test_simulation_and_server_agree_on_the_cache_of_a_token(model: Path, tmp_path: Path) -> None:
    names = [*PRESETS, *(f"random:{name}" for name in RANDOM_PRESETS)]
    for name in names:
        config = find_model(name).config
        assert find_shape(name).kv_bytes_per_token == kv_bytes_per_block(config, 1, torch.bfloat16)
        assert find_shape(name.removeprefix("random:")) == find_shape(name)
    without_head_dim = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    new_transformers_model(without_head_dim).to(torch.bfloat16).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for directory in (tmp_path, model):
        llm = LLM(directory, architectures_from=[OUTSIDE], device="cpu", dtype="bfloat16", kv_cache_bytes=10**6)
        shape = find_shape(str(directory), [OUTSIDE])
        kept = sum(tensor.nbytes for layer in llm._engine._runner._kv_cache for tensor in layer)
        assert kept == llm.stats().num_blocks * 16 * shape.kv_bytes_per_token
        assert shape.weight_bytes == llm.weight_bytes
    assert find_shape(str(tmp_path)).kv_bytes_per_token == 2 * 2 * 2 * 2 * 128
