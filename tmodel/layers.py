"""Layers that architectures share. They hold weights and call the KernelSet, and know no checkpoint's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from tkernels import KernelSet
from tkernels.launch import Kernel
from tkernels.quantized.scaled_weight import ScaledWeight
from tkernels.quantized.stacked import StackedWeight
from tkernels.quantized.stacked_scaled import StackedScaledWeight
from tkernels.quantized.weight import QuantizedWeight
from tkernels.ranges import Range
from tmodel.batch import Batch


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, x [T, K] -> [T, N].

    Attributes:
        range: Names the layer while it runs, because one kernel serves every linear of a model.
        matmul: The kernel for its kind of weight.
        weight: [N, K], dense or quantized.
        bias: [N], or None.
    """

    range: Range
    matmul: Callable[..., torch.Tensor]
    weight: torch.Tensor | QuantizedWeight | ScaledWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with self.range:
            if self.bias is None:
                return self.matmul(x, self.weight)
            return self.matmul(x, self.weight, bias=self.bias)


@dataclass(frozen=True, slots=True)
class ScaledMatmul:
    """The kernels for a weight of 8-bit codes: inputs become codes, and codes are multiplied.

    Attributes:
        quantize: x [T, K] -> (codes [T, K], scales), as the weight wants them.
        matmul: (codes, scales, the weight's codes, its scales) -> [T, N].
    """

    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    matmul: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor, weight: ScaledWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        codes, scales = self.quantize(x)
        return self.matmul(codes, scales, weight.values, weight.scales, bias=bias, out_dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class JoinedLinear:
    """x [T, K] -> [T, sum of N] by layers whose weights do not join: one is dense, or they are quantized unlike."""

    parts: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)  # [T, N] each


@dataclass(frozen=True, slots=True)
class GateUp:
    """x [T, H] -> silu(gate) * up [T, I] by one kernel, with the two projections' dense weight [2 I, H]."""

    gate_up_swiglu: Callable[..., torch.Tensor]
    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate_up_swiglu(x, self.weight)


@dataclass(frozen=True, slots=True)
class SplitGateUp:
    """x [T, H] -> silu(gate) * up [T, I] by two kernels: the projections, then the SwiGLU over them."""

    projections: Linear | JoinedLinear
    swiglu: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.swiglu(self.projections(x))  # [T, H] -> [T, 2 I] -> [T, I]


@dataclass(frozen=True, slots=True)
class ExpertsMLP:
    """x [T, H] -> [T, H] by the experts that each token was given, of E.

    Attributes:
        moe_mlp: The kernel.
        gate_up: [E, 2 I, H], dense or quantized.
        down: [E, H, I], likewise.
        gate_up_bias: [E, 2 I], or None.
        down_bias: [E, H], or None.
        limit: Of gate and up, in SwiGLU's clamped form; None is the other form.
    """

    moe_mlp: Kernel
    gate_up: torch.Tensor | StackedWeight | StackedScaledWeight
    down: torch.Tensor | StackedWeight | StackedScaledWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    limit: float | None = None

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.moe_mlp(
            x, experts, weights, self.gate_up, self.down,
            gate_up_bias=self.gate_up_bias, down_bias=self.down_bias, limit=self.limit,
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class MatmulGelu:
    """x [T, K] -> gelu(x W^T + b) [T, N] by one kernel, with a dense weight [N, K]; by the curve of tanh, or not."""

    matmul_gelu: Callable[..., torch.Tensor]
    weight: torch.Tensor
    bias: torch.Tensor | None
    tanh: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul_gelu(x, self.weight, bias=self.bias, tanh=self.tanh)


@dataclass(frozen=True, slots=True)
class SplitGelu:
    """x [T, K] -> gelu(x W^T + b) [T, N] by two kernels: the projection, then gelu of what it wrote."""

    projection: Linear | JoinedLinear
    gelu: Callable[..., torch.Tensor]
    tanh: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.gelu(self.projection(x), tanh=self.tanh)


def count_weight_bytes(part: Any) -> int:
    """Bytes of all weights in a layer, or in lists of layers. Tied weights share memory and count once."""
    sizes: dict[int, int] = {}
    _collect_sizes(part, sizes)
    return sum(sizes.values())


def _collect_sizes(part: Any, sizes: dict[int, int]) -> None:
    """Adds address -> bytes of every weight in `part` to `sizes`."""
    if isinstance(part, torch.Tensor):
        sizes[part.data_ptr()] = part.nbytes
    elif isinstance(part, QuantizedWeight):
        sizes[part.packed.data_ptr()] = part.nbytes
    elif isinstance(part, ScaledWeight):
        sizes[part.values.data_ptr()] = part.nbytes
    elif isinstance(part, list | tuple):
        for each in part:
            _collect_sizes(each, sizes)
    elif is_dataclass(part) and not isinstance(part, Kernel):
        for field in fields(part):
            _collect_sizes(getattr(part, field.name), sizes)


class PagedAttention:
    """One step's attention over the paged cache: one kernel takes decode rows, another takes prefill chunks.

    A step makes it once, so layers do not slice the batch's tensors again. Of a step that is recorded in pieces it lies
    between them, and each replay hands it a batch of its own.

    Args:
        kernels: With paged_decode and paged_prefill, and cascade_decode where batches have groups.
        batch: Of the step.
        scale: That scores are multiplied by.
    """

    __slots__ = (
        "_between",
        "_bound",
        "context_lens",
        "cu_seqlens_q",
        "decode_tables",
        "kernels",
        "max_context_len",
        "num_decodes",
        "num_prefills",
        "positions",
        "prefill_context_lens",
        "prefill_tables",
        "prefix_groups",
        "scale",
        "slots",
    )

    def __init__(self, kernels: KernelSet, batch: Batch, scale: float) -> None:
        self.kernels = kernels
        self.scale = scale
        self.positions, self.slots = batch.positions, batch.slots
        self._between = batch.attend_between
        self._bind(batch)

    def _bind(self, batch: Batch) -> None:
        """Takes from a batch which keys each token sees."""
        split = batch.num_decodes
        self._bound = batch
        self.max_context_len = batch.max_context_len
        self.num_decodes = split
        self.num_prefills = batch.num_prefills
        self.decode_tables, self.context_lens = batch.block_tables[:split], batch.context_lens[:split]
        self.prefill_tables, self.prefill_context_lens = batch.block_tables[split:], batch.context_lens[split:]
        self.cu_seqlens_q = batch.cu_seqlens_q
        self.prefix_groups = batch.prefix_groups

    def __call__(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None,
        **options: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Attends over the caches, which already hold this step's keys and values.

        Args:
            q: [T, Hq, D].
            k_cache: [P, S, Hkv, D].
            v_cache: [P, S, Hkv, D].
            window: Tokens that a token attends to; None is all.
            **options: k_scale and v_scale, [Hkv] float32 each, of caches that have some; sinks [Hq] float32.

        Returns:
            [T, Hq, D]; the rows of padding are undefined.
        """
        if self._between is None:
            return self._attend(q, k_cache, v_cache, window, options)

        def attend(batch: Batch, q: torch.Tensor) -> torch.Tensor:
            if batch is not self._bound:
                self._bind(batch)
            return self._attend(q, k_cache, v_cache, window, options)

        return self._between(q, v_cache.shape[3], attend)

    def _attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None,
        options: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        split = self.num_decodes
        if split == 0 and self.num_prefills:
            return self._prefill(q, k_cache, v_cache, window, options)
        decoded = self._decode(q[:split], k_cache, v_cache, window, options)
        if split == q.shape[0]:
            return decoded
        # After the decode rows come prefill chunks and padding, or padding alone, which needs no launch.
        after = q[split:]
        rest = self._prefill(after, k_cache, v_cache, window, options) if self.num_prefills else torch.zeros_like(after)
        return torch.cat((decoded, rest))

    def _decode(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None,
        options: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        groups = self.prefix_groups
        decoded: torch.Tensor
        if groups is None:
            decoded = self.kernels.paged_decode(
                q, k_cache, v_cache, self.decode_tables, self.context_lens, self.scale,
                max_context_len=self.max_context_len, window=window, **options,
            )  # fmt: skip
        else:
            decoded = self.kernels.cascade_decode(
                q, k_cache, v_cache, self.decode_tables, self.context_lens, groups.group_starts, groups.prefix_lens,
                self.scale, max_context_len=self.max_context_len, max_prefix_len=groups.max_prefix_len, window=window,
                **options,
            )  # fmt: skip
        return decoded

    def _prefill(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, window: int | None,
        options: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        attended: torch.Tensor = self.kernels.paged_prefill(
            q, k_cache, v_cache, self.prefill_tables, self.cu_seqlens_q, self.prefill_context_lens, self.scale,
            max_context_len=self.max_context_len, window=window, **options,
        )  # fmt: skip
        return attended
