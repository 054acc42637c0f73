"""Small mixtures of experts, written without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tests.tmodel.conftest import CONFIG
from tmodel.loading import parse_config

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
"""What a mixture's config.json has beside, or otherwise."""

SMALL = {**CONFIG, **MIXTURE}


def mixture_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under the names of the config's architecture, which parity compares with transformers'."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parse_config({name: value for name, value in config.items() if name != "quantization_config"}).tensors()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
