"""Published shapes with random weights: a model of the real size, for measuring, that nobody has to download."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tmodel.architectures import find_architecture
from tmodel.config import ModelConfig, parse_config

VERSION = 1  # goes up when other weights come out
_STD = 0.02  # transformers' initializer_range
PRESET_TABLE: Mapping[str, Any] = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
"""Every preset's sizes. Data, so that their names are known where torch is not loaded."""

RANDOM_PRESETS: Mapping[str, Mapping[str, Any]] = PRESET_TABLE["random"]
"""The published configurations of Qwen/<name> on the Hugging Face hub, as far as they decide what is computed."""


def config_of(shape: Mapping[str, Any]) -> ModelConfig:
    """What `load_config` will say of a directory that `write_random` made."""
    raw = _config_json(shape)
    return find_architecture(raw["architectures"][0]).resolve(parse_config(raw), ())


def num_parameters(shape: Mapping[str, Any]) -> int:
    return sum(math.prod(size) for tensors in _shards(config_of(shape)) for size in tensors.values())


def write_random(shape: Mapping[str, Any], directory: Path, seed: int) -> None:
    """config.json and bfloat16 weights into the empty `directory`: matrices from a normal distribution, norms of ones.
    The same on every machine. A layer is a file, so that one of them is in memory at a time. There is no tokenizer and
    no end token.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = list(_shards(config_of(shape)))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: _drawn(size, generator) for name, size in tensors.items()}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    total = 2 * num_parameters(shape)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in (("config.json", _config_json(shape)), ("model.safetensors.index.json", index)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config_json(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", **shape}


def _drawn(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size, generator=generator) * _STD).to(torch.bfloat16)


def _shards(config: ModelConfig) -> Iterator[dict[str, tuple[int, ...]]]:
    """The tensors' shapes by the names of a Qwen3 checkpoint: what is around the layers, then each layer."""
    hidden, intermediate, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    around: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    if not config.tie_word_embeddings:
        around["lm_head.weight"] = (config.vocab_size, hidden)
    yield around
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,),
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }  # fmt: skip
    for index in range(config.num_layers):
        yield {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
