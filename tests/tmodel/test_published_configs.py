"""config.json files as they stand in public repositories: read, with the tensors that their index lists, or refused.

Each line of data/published_configs.jsonl is one of them, whole, with the repository, path and commit that it was found
at and the licence of the model that it describes. Where the repository has an index of sharded weights beside it, the
line tells of that how many tensors there are, the SHA-256 of their sorted names (one a line), all tensors' bytes where
the index has them, and how many rotary tables are among the tensors, which are no weights and not counted.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tmodel import ConfigError, load_config
from tmodel.fields import RotaryConfig
from tmodel.rotary import Llama3Rope
from tmodel.transformers_models import new_transformers_model

LINES = (Path(__file__).parent / "data" / "published_configs.jsonl").read_text(encoding="utf-8").splitlines()
ROWS = [json.loads(line) for line in LINES]
READ = [row for row in ROWS if "refused" not in row]
REFUSED = [row for row in ROWS if "refused" in row]


def of_repository(row: dict[str, Any]) -> str:
    return str(row["repository"])


def directory_of(row: dict[str, Any], directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(row["config"]))
    return directory


def test_there_are_enough_and_each_says_where_it_is_from() -> None:
    assert len(READ) >= 20
    assert len(REFUSED) >= 5
    assert all(row[key] for row in ROWS for key in ("repository", "path", "commit", "model_licence", "config"))
    assert len({row["repository"] for row in ROWS}) == len(ROWS)
    assert sum("index" in row for row in READ) >= 10


@pytest.mark.parametrize("row", READ, ids=of_repository)
def test_a_config_is_read(row: dict[str, Any], tmp_path: Path) -> None:
    raw = row["config"]
    config = load_config(directory_of(row, tmp_path))
    layers, heads = (
        ("n_layer", "n_head") if raw["model_type"] == "gpt2" else ("num_hidden_layers", "num_attention_heads")
    )
    assert (config.num_layers, config.num_heads) == (raw[layers], raw[heads])
    assert config.num_kv_heads == raw.get("num_key_value_heads", config.num_heads)
    assert config.vocab_size == raw["vocab_size"]
    window = raw.get("sliding_window") if raw["model_type"] == "mistral" else None  # none of the others uses its own
    assert config.windows == (window,) * config.num_layers
    if not isinstance(config.fields, RotaryConfig):
        assert raw["model_type"] == "gpt2"
        return
    rope, scaling = config.fields.rope_parameters, raw.get("rope_scaling") or {}
    assert rope.rope_theta == raw.get("rope_theta", 10000.0)
    assert isinstance(rope, Llama3Rope) == (scaling.get("rope_type") == "llama3")
    assert getattr(rope, "factor", None) == scaling.get("factor")


@pytest.mark.parametrize("row", [row for row in READ if "index" in row], ids=of_repository)
def test_the_tensors_are_those_of_the_index(row: dict[str, Any], tmp_path: Path) -> None:
    """Its names, none left over on either side, and its bytes."""
    config, index = load_config(directory_of(row, tmp_path)), row["index"]
    tensors = config.tensors()
    assert len(tensors) == index["num_tensors"]
    assert hashlib.sha256("\n".join(sorted(tensors)).encode()).hexdigest() == index["names_sha256"]
    if "total_bytes" in index:
        weights = sum(math.prod(shape) for shape in tensors.values()) * config.dtype.itemsize
        table = index.get("rotary_buffers", 0) * config.head_dim // 2
        assert index["total_bytes"] - weights in (2 * table, 4 * table)


@pytest.mark.parametrize("row", REFUSED, ids=of_repository)
def test_what_is_not_supported_is_refused_by_name(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: .*{row['refused']}"):
        load_config(directory_of(row, tmp_path))


def raw_type(row: dict[str, Any]) -> str:
    return str(row["config"]["model_type"])


def as_saved(shapes: dict[str, tuple[int, ...]], model_type: str) -> dict[str, tuple[int, ...]]:
    """transformers' tensors in memory by the names that it saves them by: those of experts are joined in memory."""
    if model_type != "mixtral":
        return shapes
    saved: dict[str, tuple[int, ...]] = {}
    for name, (first, *rest) in shapes.items():
        prefix, joined, kind = name.replace(".mlp.", ".block_sparse_moe.").partition(".experts.")
        if not joined:
            saved[prefix] = (first, *rest)
        for expert in range(first if joined else 0):
            outputs, inputs = rest
            parts = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
            saved |= {f"{prefix}.experts.{expert}.{part}.weight": (outputs // len(parts), inputs) for part in parts}
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("row", READ, ids=of_repository)
def test_the_tensors_are_those_of_transformers(row: dict[str, Any], tmp_path: Path) -> None:
    import torch

    with torch.device("meta"):
        theirs = new_transformers_model(row["config"])
    shapes = as_saved({name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}, raw_type(row))
    if theirs.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert dict(load_config(directory_of(row, tmp_path)).tensors()) == shapes
