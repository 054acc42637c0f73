"""Causal attention over a paged cache, queries and keys turned by their positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from tmodel.formats.cache_scheme import read_cache_scales
from tmodel.layers import JoinedLinear, Linear, PagedAttention
from tmodel.linear_reader import LinearReader
from tmodel.quantization import Feed, LinearShape
from tmodel.rotary import Rope
from tmodel.weights import Checkpoint


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention in which Hq query heads share Hkv key-value heads of D dims.

    Source: Ainslie et al., GQA, 2023; with as many key-value heads as query heads it is multi-head attention.

    Attributes:
        hidden_size: H, of the input and the output.
        num_heads: Hq.
        num_kv_heads: Hkv, a divisor of Hq.
        head_dim: D.
        rope: How queries and keys are turned.
        window: The keys that a query sees, itself included; None is all before it.
        qkv_bias: Whether the query, key and value projections have a bias.
        output_bias: Whether the output projection has one.
        head_norm_eps: Of an RMS norm of each query and each key head, ahead of the turn; None is no norm.
        joint_norm_eps: Of an RMS norm of all query heads as one vector, and of all key heads; None is no norm.
        sinks: Whether each query head has one more logit, which has a weight and no value (gpt-oss: OpenAI, 2025).
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm_eps: float | None = None
    joint_norm_eps: float | None = None
    sinks: bool = False

    def beside_linears(self, name: str) -> dict[str, tuple[int, ...]]:
        """Name -> shape of what is no linear layer: the norms, and the sinks; `name` is the attention's own."""
        return {**self.norms(name), **({f"{name}.sinks": (self.num_heads,)} if self.sinks else {})}

    def norms(self, name: str) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the norms of queries and keys; `name` is the attention's own."""
        widths = self.joint_norm_widths
        if self.head_norm_eps is not None:
            widths = (self.head_dim, self.head_dim)
        return {f"{name}.{norm}.weight": (width,) for norm, width in zip(("q_norm", "k_norm"), widths, strict=False)}

    @property
    def joint_norm_widths(self) -> tuple[int, ...]:
        """Of the norms of all query heads and of all key heads; none where there are none."""
        if self.joint_norm_eps is None:
            return ()
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def linears(self, name: str, fed_by: Feed) -> tuple[LinearShape, LinearShape]:
        """The joint query, key and value projection, whose inputs `fed_by` makes, and the output projection."""
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        values = Feed(f"{name}.v_proj", _value_rows(self.num_heads, self.num_kv_heads, self.head_dim))
        qkv = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        outputs = (q_width, kv_width, kv_width)
        return (
            LinearShape(qkv, outputs, self.hidden_size, self.qkv_bias, fed_by=fed_by),
            LinearShape((f"{name}.o_proj",), (self.hidden_size,), q_width, self.output_bias, fed_by=values),
        )

    def build(self, name: str, fed_by: Feed, checkpoint: Checkpoint, reader: LinearReader) -> AttentionLayer:
        """The layer with its weights out of the checkpoint."""
        qkv, output = self.linears(name, fed_by)
        norms = [checkpoint.tensor(tensor, shape) for tensor, shape in self.norms(name).items()]
        q_norm, k_norm = norms or (None, None)
        quantization = reader.quantization
        scales: dict[str, torch.Tensor] = {}
        if quantization is not None and quantization.cache_dtype is not None:
            scales["k_scale"], scales["v_scale"] = read_cache_scales(checkpoint, name, self.num_kv_heads)
        sinks = {"sinks": self._read_sinks(name, checkpoint)} if self.sinks else {}
        return AttentionLayer(self, reader.linear(qkv), q_norm, k_norm, reader.linear(output), scales, sinks)

    def _read_sinks(self, name: str, checkpoint: Checkpoint) -> torch.Tensor:
        """[Hq] float32; -inf is none, and +inf would take all weight from the keys."""
        tensor = f"{name}.sinks"
        sinks = checkpoint.tensor(tensor, (self.num_heads,)).float()
        if not bool((sinks < torch.inf).all()):
            raise checkpoint.error(tensor, "has a NaN or +inf; a sink must be a number or -inf")
        return sinks


@cache
def _value_rows(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[range, ...]:
    """The rows of the value projection that each query head reads; all layers share them."""
    shared = num_heads // num_kv_heads
    starts = (head // shared * head_dim for head in range(num_heads))
    return tuple(range(start, start + head_dim) for start in starts)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer's attention with its weights."""

    shape: GroupedQueryAttention
    qkv: Linear | JoinedLinear  # H -> (Hq + 2 Hkv) D
    q_norm: torch.Tensor | None  # [D], or [Hq D] of a joint norm
    k_norm: torch.Tensor | None  # [D], or [Hkv D]
    output: Linear | JoinedLinear  # Hq D -> H
    scales: Mapping[str, torch.Tensor]  # k_scale and v_scale, [Hkv] each, where the checkpoint has some for its cache
    sinks: Mapping[str, torch.Tensor]  # sinks, [Hq], where heads have some

    def mix(
        self, hidden: torch.Tensor, step: PagedAttention, rotation: tuple[torch.Tensor, torch.Tensor],
        k_cache: torch.Tensor, v_cache: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """What the heads take from the tokens before, ahead of the output projection; writes the caches.

        Args:
            hidden: [T, H].
            step: The step's attention.
            rotation: Cos and sin, [L, R/2] each.
            k_cache: [P, S, Hkv, D], this layer's keys.
            v_cache: [P, S, Hkv, D], its values.

        Returns:
            [T, Hq D], the heads side by side.
        """
        shape, cos_sin = self.shape, rotation
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        q, k, v = self.qkv(hidden).view(-1, sum(heads), shape.head_dim).split(heads, dim=1)  # views [T, heads, D]
        q_norm, k_norm = self.q_norm, self.k_norm
        if shape.joint_norm_eps is not None:
            q, k = (
                step.kernels.rms_norm(heads.flatten(1), norm, shape.joint_norm_eps).view(heads.shape)
                for heads, norm in ((q, q_norm), (k, k_norm))
            )
            q_norm = k_norm = None
        step.kernels.qk_norm_rope_scatter(
            q, k, v, *cos_sin, step.positions, k_cache, v_cache, step.slots,
            q_weight=q_norm, k_weight=k_norm, eps=shape.head_norm_eps or 0.0,
            **self.scales,
        )  # fmt: skip
        return step(q, k_cache, v_cache, shape.window, **self.scales, **self.sinks).flatten(1)
