"""`tk convert` of pytorch_model.bin, whole or in parts: the same tensors, and nothing of a pickle but them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import experiments.conversion.checkpoint
from experiments.cli import app
from tests.tmodel.conftest import CONFIG, checkpoint_tensors

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NAME = "model.layers.1.mlp.up_proj.weight"


def convert(source: Path, out: Path) -> Any:
    return CliRunner().invoke(app, ["convert", str(source), str(out)])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with config.json and a tokenizer's file, and no weights yet."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer_config.json").write_text("{}")
    return directory


def save(values: Mapping[str, Any], file: Path) -> None:
    torch.save(dict(values), file)


def stored_in(directory: Path) -> dict[str, torch.Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_refused(source: Path, out: Path, *messages: str) -> None:
    result = convert(source, out)
    assert result.exit_code == 2, result.stdout
    for message in messages:
        assert re.search(message, result.stderr), result.stderr
    assert not out.exists()
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_one_file_becomes_the_same_tensors(source: Path, tmp_path: Path) -> None:
    tensors = checkpoint_tensors(CONFIG)
    save({name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}, source / "pytorch_model.bin")
    save({"lr": 1.0}, source / "training_args.bin")  # beside the model in many a repository
    result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert f"{len(tensors)} tensors" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer_config.json",
    ]  # fmt: skip
    stored = stored_in(tmp_path / "out")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


def write_parts(source: Path, tensors: Mapping[str, Any]) -> None:
    names = sorted(tensors)
    parts = {f"pytorch_model-0000{part + 1}-of-00003.bin": names[part::3] for part in range(3)}
    for file, own in parts.items():
        save({name: tensors[name] for name in own}, source / file)
    weight_map = {name: file for file, own in parts.items() for name in own}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_parts_become_parts_of_the_size_that_is_asked_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments.conversion.checkpoint, "SHARD_BYTES", 10_000)
    tensors = checkpoint_tensors(CONFIG)
    write_parts(source, tensors)
    result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 12_000 for shard in shards)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert f"in {len(shards)} files" in result.stdout
    stored = stored_in(tmp_path / "out")
    assert stored.keys() == index["weight_map"].keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


def test_a_tied_head_is_stored_once(source: Path, tmp_path: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(tied))
    tensors = checkpoint_tensors(tied)
    save({**tensors, HEAD: tensors[EMBEDDING]}, source / "pytorch_model.bin")
    result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert f"left out, second names of tensors: {HEAD}" in result.stdout
    assert stored_in(tmp_path / "out").keys() == tensors.keys()

    save({**tensors, HEAD: tensors[EMBEDDING].clone()}, source / "pytorch_model.bin")  # two tensors of equal values
    assert convert(source, tmp_path / "two").exit_code == 0
    assert HEAD in stored_in(tmp_path / "two")


def test_names_that_share_memory_without_being_tied_are_stored_each(source: Path, tmp_path: Path) -> None:
    """The head is the embedding, and norms are parts of one tensor, one of them with a stride."""
    tensors = checkpoint_tensors(CONFIG)
    whole = torch.randn(64)
    tensors[HEAD] = tensors[EMBEDDING]
    tensors["model.norm.weight"] = whole[:16]
    tensors["model.layers.0.input_layernorm.weight"] = whole[8:24]
    tensors["model.layers.1.input_layernorm.weight"] = whole[::4]
    tensors[NAME] = torch.randn(tensors[NAME].shape[::-1]).T
    save(tensors, source / "pytorch_model.bin")
    result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "left out" not in result.stdout
    stored = stored_in(tmp_path / "out")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("shape", [(2**40,), (2**20, 2**20), (64, 2**30)])
def test_a_tensor_that_is_shown_larger_than_it_is_stored_is_not_written(
    source: Path, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    tensors = {**checkpoint_tensors(CONFIG), NAME: torch.zeros(1).expand(shape)}
    save(tensors, source / "pytorch_model.bin")
    check_refused(source, tmp_path / "out", rf"pytorch_model\.bin: tensor '{NAME}' has shape \[.* made of \d+ stored")
    stored = torch.zeros(2**16)
    copies = {f"copy.{index}": stored[index:] for index in range(100)}
    save({**checkpoint_tensors(CONFIG), **copies}, source / "pytorch_model.bin")
    check_refused(source, tmp_path / "out", r"pytorch_model\.bin: tensor 'copy\.0' has shape \[65536\], which config")


def test_a_tensor_that_is_asked_for_may_be_expanded(source: Path, tmp_path: Path) -> None:
    tensors = {**checkpoint_tensors(CONFIG), NAME: torch.ones(1).expand(24, 16)}
    save(tensors, source / "pytorch_model.bin")
    result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert torch.equal(stored_in(tmp_path / "out")[NAME], torch.ones(24, 16))


def test_plain_numbers_are_left_out_by_name(source: Path, tmp_path: Path) -> None:
    save({**checkpoint_tensors(CONFIG), "epoch": 3, "best": 0.5}, source / "pytorch_model.bin")
    result = convert(source, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "left out, plain numbers: best, epoch" in result.stdout
    assert not {"epoch", "best"} & stored_in(tmp_path / "out").keys()


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


@pytest.mark.parametrize("parts", [False, True])
def test_a_pickle_with_code_is_refused_and_what_it_would_call_is_named(
    source: Path, tmp_path: Path, parts: bool
) -> None:
    tensors = {**checkpoint_tensors(CONFIG), NAME: Evil(tmp_path / "it ran")}
    if parts:
        write_parts(source, tensors)
    else:
        save(tensors, source / "pytorch_model.bin")
    check_refused(source, tmp_path / "out", r"pytorch_model\S*\.bin: holds more than tensors.*: \w+\.mkdir; not opened")
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocabulary": "abc"}, r"pytorch_model\.bin: 'vocabulary' is of type str, no tensor and no plain number"),
        ({"state_dict": {NAME: torch.ones(1)}}, "'state_dict' is of type dict"),
        ({NAME: None}, f"'{NAME}' is of type NoneType"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "tensor 'a' is complex64; supported are dense ones of"),
        ({"a": torch.ones(2)}, r"pytorch_model\.bin: unexpected tensor 'a'; the architecture in config\.json has no"),
        ({NAME: torch.ones(3)}, rf"pytorch_model\.bin: tensor '{NAME}' has shape \[3\]"),
    ],
)
def test_what_is_no_weight_of_the_model_is_named(
    source: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save({**checkpoint_tensors(CONFIG), **change}, source / "pytorch_model.bin")
    check_refused(source, tmp_path / "out", message)


def test_a_pickle_that_may_never_end_is_not_read(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / "pytorch_model.bin")
    check_refused(source, tmp_path / "out", r"pytorch_model\.bin: cannot be read: it is not a regular file")


def test_damaged_files_and_indices_are_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_parts(source, checkpoint_tensors(CONFIG))
    second, index = source / "pytorch_model-00002-of-00003.bin", source / "pytorch_model.bin.index.json"
    whole, listed = second.read_bytes(), json.loads(index.read_text())
    second.write_bytes(whole[: len(whole) // 2])
    check_refused(source, out, r"pytorch_model-00002-of-00003\.bin: empty, cut short, or a pickle of the old kind")
    second.write_bytes(whole[:2000] + bytes(64) + whole[2064:])
    check_refused(source, out, r"pytorch_model-00002-of-00003\.bin: .*damaged")
    second.unlink()
    check_refused(source, out, r"pytorch_model-00002-of-00003\.bin: no such file; .* says that it holds")
    second.write_bytes(whole)
    listed["weight_map"]["ghost"] = second.name
    index.write_text(json.dumps(listed))
    check_refused(source, out, r"pytorch_model-00002-of-00003\.bin: tensor 'ghost' is missing")
    listed["weight_map"]["ghost"] = "../elsewhere.bin"
    index.write_text(json.dumps(listed))
    check_refused(source, out, r"tensor 'ghost' is in '\.\./elsewhere\.bin', not a bin file here")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda file: os.kill(os.getpid(), 9), "the process that opened it ended: killed by SIGKILL"),
        (lambda file: os._exit(0), "the process that opened it ended: its process left with exit status 0 before its"),
    ],
)
def test_a_pickle_that_ends_the_process_that_opens_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Any, message: str
) -> None:
    save(checkpoint_tensors(CONFIG), source / "pytorch_model.bin")
    monkeypatch.setattr(experiments.conversion.checkpoint, "read_pickle", end)
    check_refused(source, tmp_path / "out", rf"pytorch_model\.bin: {message}")
