"""The cache that a checkpoint was calibrated for: keys and values in e4m3, with static scales of the checkpoint's own.

compressed-tensors writes `kv_cache_scheme` for it, and in each layer `self_attn.k_scale` and `self_attn.v_scale`: what
a cached key or value is multiplied by when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from tkernels.quantized.row_codes import SMALLEST_SCALE
from tmodel.formats.base import parse_settings, read_values
from tmodel.json_files import ConfigError
from tmodel.weights import Checkpoint

CACHE_DTYPE = torch.float8_e4m3fn


class CacheScheme(BaseModel):
    """The one scheme that is served: one static scale for the keys of a layer, one for its values."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_bits: Literal[8]
    type: Literal["float"]
    strategy: Literal["tensor"] = "tensor"
    dynamic: Literal[False] = False
    symmetric: Literal[True] = True


def parse_cache_dtype(raw: Mapping[str, Any] | None) -> torch.dtype | None:
    """The dtype in which a `quantization_config` asks keys and values to be kept; None is the model's.

    Raises:
        ConfigError: It asks for another scheme than the one that is served.
    """
    scheme = (raw or {}).get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ConfigError(f"kv_cache_scheme: must be a mapping, got {scheme!r}")
    try:
        parse_settings(CacheScheme, scheme)
    except ConfigError as error:
        raise ConfigError(
            f"kv_cache_scheme: {error}. Supported are 8-bit floats with one static scale for a layer's keys and one "
            "for its values"
        ) from error.__cause__
    return CACHE_DTYPE


def read_cache_scales(checkpoint: Checkpoint, name: str, num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads what the cached keys and values of attention `name` are multiplied by.

    Args:
        checkpoint: Where they are.
        name: The beginning of their names, "model.layers.0.self_attn".
        num_kv_heads: Hkv.

    Returns:
        (of keys, of values), [Hkv] float32 each.

    Raises:
        WeightError: A scale is missing, has another shape, or is no finite number whose reciprocal float32 holds.
    """
    return _read_scale(checkpoint, f"{name}.k_scale", num_kv_heads), _read_scale(
        checkpoint, f"{name}.v_scale", num_kv_heads
    )


def _read_scale(checkpoint: Checkpoint, name: str, num_kv_heads: int) -> torch.Tensor:
    shape = () if name in checkpoint and checkpoint.shape(name) == () else (1,)
    scale = read_values(checkpoint, name, shape, "[1]").float()
    if float(scale) < SMALLEST_SCALE:
        raise checkpoint.error(
            name, f"is {float(scale):g}; what is cached is divided by it, so it must be 2**-126 or more"
        )
    return scale.expand(num_kv_heads).contiguous()
