"""One decoder layer in plain torch: whole windows in, whole windows out, differentiable, every linear's input shown.

The served model packs tokens, writes a KV cache and calls kernels; calibration wants none of that. It wants to see what
each linear multiplies, to go on with a layer whose weights were changed, and to differentiate. So the layer is written
down once more, over a mapping of its weights, as tmodel/architectures/qwen3.py and its sources have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from tmodel.config import ModelConfig
from tmodel.json_files import ConfigError
from tmodel.rotary import Rope

Weights = Mapping[str, torch.Tensor]
"""A layer's tensors by what follows "model.layers.<index>." in a checkpoint, as in "mlp.up_proj.weight"."""

Observe = Callable[[int, torch.Tensor], None]
"""observe(group, x [tokens, K]): what the linears of GROUPS[group] are about to multiply."""

GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The linears of a layer in the order of computation; those of a group share one input."""

LINEARS = tuple(name for group in GROUPS for name in group)


@dataclass(frozen=True)
class Decoder:
    """What a layer needs besides its weights. cos, sin: [S, D/2] for windows of S tokens."""

    config: ModelConfig
    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(
        self, weights: Weights, index: int, hidden: torch.Tensor, observe: Observe | None = None
    ) -> torch.Tensor:
        """hidden [B, S, H] -> [B, S, H] through layer `index`, each window from position 0 and alone."""
        config, fields = self.config, cast(Any, self.config.fields)

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], fields.rms_norm_eps)

        def linears(group: int, x: torch.Tensor) -> list[torch.Tensor]:
            if observe is not None:
                observe(group, x.detach().flatten(0, 1))
            return [F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias")) for name in GROUPS[group]]

        heads = [x.unflatten(-1, (-1, config.head_dim)) for x in linears(0, normed(hidden, "input_layernorm"))]
        q, k = normed(heads[0], "self_attn.q_norm"), normed(heads[1], "self_attn.k_norm")  # [B, S, heads, D]
        mixed = self._attend(self._rotated(q), self._rotated(k), heads[2], config.windows[index])  # [B, S, Hq D]
        (attended,) = linears(1, mixed)
        hidden = hidden + attended
        gate, up = linears(2, normed(hidden, "post_attention_layernorm"))
        (mlp,) = linears(3, F.silu(gate) * up)
        return hidden + mlp

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, heads, D] turned by its position, halves of D paired."""
        low, high = x.chunk(2, dim=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]  # [S, 1, D/2]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
        """q [B, S, Hq, D], k and v [B, S, Hkv, D] -> [B, S, Hq D]; a token sees itself and the window - 1 before it."""
        num_tokens = q.shape[1]
        mask = torch.ones((num_tokens, num_tokens), dtype=torch.bool).tril()
        if window is not None:
            mask &= ~mask.tril(-window)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, S, D]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


def decoder_for(config: ModelConfig, num_tokens: int, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder for windows of `num_tokens`. ConfigError for an architecture that is not written down here."""
    if config.architecture.name != "Qwen3ForCausalLM":
        raise ConfigError(f"{config.architecture.name} cannot be calibrated; supported is Qwen3ForCausalLM")
    rope = Rope(config.head_dim, cast(Any, config.fields).resolved_rope_theta())
    cos, sin = rope.tables(num_tokens, dtype=dtype, device="cpu")
    return Decoder(config, cos, sin)


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """[N, K] of each of LINEARS."""
    hidden, intermediate = cast(Any, config.fields).hidden_size, cast(Any, config.fields).intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (q_width, hidden),
        "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden),
        "self_attn.o_proj": (hidden, q_width),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a layer, by the names of Weights."""
    linears = linear_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    if cast(Any, config.fields).attention_bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items() if name.startswith("self_attn.")}
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{name}.weight"] = (cast(Any, config.fields).hidden_size,)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        shapes[f"{name}.weight"] = (config.head_dim,)
    return shapes
