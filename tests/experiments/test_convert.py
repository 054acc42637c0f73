"""`tk convert`: the original SqueezeLLM pickle becomes a model that is served; nothing else is touched."""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import experiments.conversion.checkpoint
from experiments.cli import app
from tests.tmodel.formats.by_hand import Kind
from tests.tmodel.formats.models import write_models
from tests.tmodel.formats.test_models import served, tokens

LAYER = "model.layers.1.mlp.down_proj"


def convert(source: Path, out: Path) -> Any:
    return CliRunner().invoke(app, ["convert", str(source), str(out)])


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A SqueezeLLM model as its authors' code leaves it, and beside it "dense", what it decodes to."""
    quantized, _ = write_models(tmp_path, Kind("squeezellm", 3))
    source = tmp_path / "original"
    source.mkdir()
    torch.save(load_file(quantized / "model.safetensors"), source / "sq-w3.pt")
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    (source / "quant_config.json").write_text('{"wbits": 3}')
    (source / "tokenizer_config.json").write_text("{}")
    return source


def test_it_is_served_like_its_dense_twin(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments.conversion.checkpoint, "SHARD_BYTES", 100_000)
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    assert f"{sum(shard.stat().st_size for shard in shards):,} bytes in {len(shards)} files" in result.stdout
    stored = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    loaded = torch.load(original / "sq-w3.pt", weights_only=True)
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in loaded.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "squeezellm", "wbits": 3}
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    (tmp_path / "out" / "tokenizer_config.json").unlink()
    assert tokens(served(tmp_path / "out")) == tokens(served(tmp_path / "dense"))


def test_the_numbers_of_outliers_beside_the_tensors_are_checked_and_dropped(original: Path, tmp_path: Path) -> None:
    """As the original packs a dense-and-sparse model: an int for each layer among the tensors."""
    tensors = torch.load(original / "sq-w3.pt", weights_only=True)
    layers = [name.removesuffix(".vals") for name in tensors if name.endswith(".vals")]
    assert len(layers) == 14
    counts = {f"sparse_threshold.{layer}": tensors[f"{layer}.vals"].shape[-1] for layer in layers}
    torch.save({**tensors, **counts}, original / "sq-w3.pt")
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())

    counts[f"sparse_threshold.{LAYER}"] += 1
    torch.save({**tensors, **counts}, original / "sq-w3.pt")
    result = convert(original, tmp_path / "again")
    assert result.exit_code == 2
    count = counts[f"sparse_threshold.{LAYER}"]
    assert f"sq-w3.pt: 'sparse_threshold.{LAYER}' says that '{LAYER}.vals' has {count} values; it has" in result.stderr


def test_nothing_is_overwritten(original: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "kept").write_text("kept")
    result = convert(original, out)
    assert result.exit_code == 2
    assert "is not an empty directory" in result.stderr
    assert [path.name for path in out.iterdir()] == ["kept"]


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('it ran')",))


def test_a_pickle_of_more_than_tensors_is_not_opened(original: Path, tmp_path: Path) -> None:
    torch.save({"a.lookup_table": Evil()}, original / "sq-w3.pt")
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 2
    assert re.search(
        r"sq-w3\.pt: holds more than tensors, which could run code here: \w+\.exec; not opened", result.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(3), "expected a mapping of names to tensors"),
        ({"a": 3}, "'a' is of type int, no tensor; expected are tensors, and whole numbers called sparse_threshold."),
        ({"sparse_threshold.a": [3]}, "'sparse_threshold.a' is of type list, no tensor"),
        ({"sparse_threshold.a": True}, "'sparse_threshold.a' is of type bool, no tensor"),
        ({"sparse_threshold.a": 3}, "'sparse_threshold.a' says that 'a.vals' has 3 values; it has 0"),
        (
            {"sparse_threshold.a": 3, "a.vals": torch.ones(4)},
            "'sparse_threshold.a' says that 'a.vals' has 3 values; it has 4",
        ),
        ({1: torch.ones(2, 8)}, "expected a mapping of names to tensors"),
        ({"model.norm.weight": torch.ones(3)}, "no tensor is called lookup_table: not a SqueezeLLM model"),
        ({"a.lookup_table": torch.ones(2, 16)}, "'a.lookup_table' has shape [2, 16], not [N, 8] as wbits says"),
        ({"a.lookup_table": torch.ones(2, 8), "b": torch.ones(2, dtype=torch.complex64)}, "'b' is complex64"),
        ({"a.lookup_table": torch.ones(2, 8)}, "tensor 'model.layers.0.self_attn.q_proj.qweight' is missing"),
    ],
)
def test_a_pickle_of_something_else(original: Path, tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, original / "sq-w3.pt")
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "original", "quantized"]


Changes = dict[str, torch.Tensor | None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x.lookup_table": torch.ones(4, 8)}, "unexpected tensor 'x.lookup_table'"),
        ({"x.weight": torch.ones(4)}, "unexpected tensor 'x.weight'"),
        ({"model.norm.weight": None}, "tensor 'model.norm.weight' is missing"),
        ({"model.embed_tokens.weight": torch.ones(3, 3)}, "'model.embed_tokens.weight' has shape [3, 3]"),
        ({f"{LAYER}.weight": torch.ones(128, 256)}, "is dense, but quantization_config says"),
        ({f"{LAYER}.lookup_table": torch.full((128, 8), torch.nan)}, f"'{LAYER}.lookup_table' has"),
        ({f"{LAYER}.qweight": None}, f"'{LAYER}.qweight' is missing"),
        ({f"{LAYER}.cols": None}, f"'{LAYER}.cols' is missing"),
    ],
)
def test_what_a_server_would_refuse_is_refused_of_the_pickle(
    original: Path, tmp_path: Path, changes: Changes, message: str
) -> None:
    tensors: Changes = {**load_file(tmp_path / "quantized" / "model.safetensors"), **changes}
    torch.save({name: tensor for name, tensor in tensors.items() if tensor is not None}, original / "sq-w3.pt")
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.stderr
    # Where the tensor is, not where it was on its way to.
    assert result.stderr.startswith(f"error: {original}")
    assert "sq-w3.pt" in result.stderr
    assert ".out-" not in result.stderr
    assert "model-0" not in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "original", "quantized"]


def half(file: Path) -> None:
    torch.save({"a.lookup_table": torch.ones(4000, 8)}, file)
    file.write_bytes(file.read_bytes()[:50_000])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: file.write_bytes(b""), "empty, cut short, or a pickle of the old kind"),
        (lambda file: file.write_bytes(pickle.dumps(Evil())), "a pickle of the old kind, which is not opened"),
        (
            lambda file: torch.save({"a": Evil()}, file, _use_new_zipfile_serialization=False),
            "a pickle of the old kind, which is not opened",
        ),
        (half, "cut short"),
        (lambda file: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file), "a TorchScript archive"),
        (lambda file: zipfile.ZipFile(file, "w").writestr("a.txt", "a"), "a zip archive that is damaged or not torch"),
    ],
)
def test_what_torch_cannot_read_is_said_without_its_advice(
    original: Path, tmp_path: Path, write: Callable[[Path], Any], message: str
) -> None:
    file = original / "sq-w3.pt"
    write(file)
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file}: ")
    assert message in result.stderr
    assert "expected what torch.save writes" in result.stderr
    assert not {"weights_only", "mmap", "it ran"} & set(re.split(r"\W+", result.stderr))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(4, 8).to_sparse(), "sparse (sparse_coo)"),
        (torch.zeros(4, 8, device="meta"), "without values (device meta)"),
        (torch.zeros(4, 8, dtype=torch.complex64), "complex64"),
    ],
)
def test_a_tensor_that_safetensors_would_not_hold(
    original: Path, tmp_path: Path, tensor: torch.Tensor, what: str
) -> None:
    torch.save({"q.lookup_table": tensor}, original / "sq-w3.pt")
    result = convert(original, tmp_path / "out")
    assert result.exit_code == 2
    assert f"tensor 'q.lookup_table' is {what}; supported are dense ones of float64, float32" in result.stderr


def test_what_is_not_there_or_no_squeezellm_is_said(original: Path, tmp_path: Path) -> None:
    def complaint(source: Path) -> str:
        result = convert(source, tmp_path / "out")
        assert result.exit_code == 2
        return str(result.stderr)

    assert "holds safetensors, which need no conversion" in complaint(tmp_path / "quantized")
    assert "not a directory with config.json" in complaint(tmp_path / "nowhere")
    (original / "sq-w3.pt").rename(original / "sq-w3.bin")
    (original / "more.pt").write_bytes(b"not a pickle at all")
    assert "has more.pt, sq-w3.bin; expected one pickle" in complaint(original)
    (original / "sq-w3.bin").unlink()
    assert "more.pt: " in complaint(original)
    (original / "quant_config.json").write_text('{"wbits": 2}')
    assert "quant_config.json: quant_method squeezellm: wbits: 2 bits; supported are 3, 4" in complaint(original)
    (original / "quant_config.json").unlink()
    (original / "more.pt").write_bytes((tmp_path / "quantized" / "model.safetensors").read_bytes())
    assert "more.pt: empty, cut short" in complaint(original)
