"""`tk eval`: perplexity, divergence and agreement against transformers' own model, and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from experiments.cli import app
from tests.tsched.conftest import TEXT, checkpoint, checkpoint_without_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 3)
    return file


__all__ = ["checkpoint", "checkpoint_without_tokenizer"]


def tk_eval(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with other weights in one layer."""
    directory = tmp_path / "changed"
    directory.mkdir()
    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 0.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def log_probabilities(directory: Path, text: Path, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, vocab] over all whole windows, each alone, and the targets [tokens], by transformers in float64."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    tokens = torch.tensor(AutoTokenizer.from_pretrained(directory)(text.read_text())["input_ids"])
    windows = tokens.unfold(0, window + 1, window)
    with torch.inference_mode():
        logits = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float64)(input_ids=windows[:, :-1]).logits
    return F.log_softmax(logits, dim=-1).flatten(0, 1), windows[:, 1:].flatten()


def test_figures_are_those_of_transformers(checkpoint: Path, changed: Path, text: Path) -> None:
    done = tk_eval("--model", changed, "--reference", checkpoint, "--text", text, "--window", 23, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    mine, targets = log_probabilities(changed, text, 23)
    dense, _ = log_probabilities(checkpoint, text, 23)
    nats = -mine[torch.arange(len(targets)), targets].mean().item()
    assert found["num_tokens"] == len(targets)
    assert found["nats"] == pytest.approx(nats, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats), rel=1e-5)
    dense_nats = -dense[torch.arange(len(targets)), targets].mean().item()
    assert abs(dense_nats - nats) > 1e-3
    assert found["reference_nats"] == pytest.approx(dense_nats, rel=1e-5)
    assert found["reference_perplexity"] == pytest.approx(math.exp(dense_nats), rel=1e-5)
    kl = (dense.exp() * (dense - mine)).sum(1).mean().item()
    assert kl > 0.01
    assert found["kl"] == pytest.approx(kl, rel=1e-4)
    agreement = (mine.argmax(1) == dense.argmax(1)).double().mean().item()
    assert 0 < agreement < 1
    assert found["top1_agreement"] == pytest.approx(agreement, abs=1e-9)


def test_a_model_of_nan_has_no_perplexity(changed: Path, text: Path) -> None:
    tensors = load_file(changed / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][:] = math.nan
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    done = tk_eval("--model", changed, "--text", text, "--window", 23)
    assert done.exit_code != 0
    assert "its logits are not finite" in done.stderr
    assert "perplexity" not in done.stdout


def test_a_model_agrees_with_itself(checkpoint: Path, text: Path) -> None:
    done = tk_eval("--model", checkpoint, "--reference", checkpoint, "--text", text, "--window", 64, "--json")
    found = json.loads(done.stdout)
    assert (found["kl"], found["top1_agreement"]) == (0.0, 1.0)


def test_the_table_says_how_the_text_was_read(checkpoint: Path, text: Path) -> None:
    done = tk_eval("--model", checkpoint, "--text", text)
    assert done.exit_code == 0
    assert "perplexity" in done.stdout
    assert "windows of 128" in " ".join(done.stdout.split())
    assert "KL" not in done.stdout


def test_the_reference_has_a_line_of_its_own(checkpoint: Path, changed: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(changed)
    (tmp_path / "b").symlink_to(checkpoint)
    done = tk_eval("--model", tmp_path / "a", "--reference", tmp_path / "b", "--text", text, "--window", 23)
    alone = json.loads(tk_eval("--model", checkpoint, "--text", text, "--window", 23, "--json").stdout)
    assert f"{alone['perplexity']:.4f}" in done.stdout
    assert f"{alone['nats']:.5f}" in done.stdout
    assert (alone["reference_nats"], alone["reference_perplexity"]) == (None, None)


def test_a_text_shorter_than_a_window_is_one(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("def scan(line):")
    done = tk_eval("--model", checkpoint, "--text", file, "--json")
    found = json.loads(done.stdout)
    mine, targets = log_probabilities(checkpoint, file, found["window"])
    assert found["num_tokens"] == found["window"] == len(targets)
    assert found["nats"] == pytest.approx(-mine[torch.arange(len(targets)), targets].mean().item(), rel=1e-5)


def test_what_cannot_be_evaluated_is_refused(
    checkpoint: Path, checkpoint_without_tokenizer: Path, text: Path, tmp_path: Path
) -> None:
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00")
    for arguments, expected in (
        (("--model", checkpoint, "--text", tmp_path / "none.txt"), "none.txt: no such file"),
        (("--model", checkpoint, "--text", tmp_path), "is a folder"),
        (("--model", checkpoint, "--text", empty), "empty.txt: is empty"),
        (("--model", checkpoint, "--text", binary), "is not UTF-8 text"),
        (("--model", tmp_path / "nowhere", "--text", text), f"there is no directory {tmp_path / 'nowhere'}"),
        (("--model", tmp_path / "nowhere", "--text", text), "presets are tiny, "),
        (("--model", checkpoint, "--text", text, "--reference", "huge"), "--reference: "),
        (("--model", checkpoint, "--text", text, "--window", 129), "was made for 128 tokens"),
        (("--model", checkpoint_without_tokenizer, "--text", text), "has no tokenizer"),
    ):
        done = tk_eval(*arguments)
        assert done.exit_code == 2, done.output
        assert expected in done.stderr
