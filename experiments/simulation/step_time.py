"""How long a step takes: the roofline of a GPU, no more.

    seconds = max(FLOPs / peak, bytes / bandwidth) + launches + copies

FLOPs: 2 for each weight of the layers and token, of experts for those that a token is given, 2 for each weight of the
last projection and sampled token, and 4 Hq D a layer for each pair of a token and a key that it sees. Bytes: the
weights once, as they are stored, of experts as many as are distinct on average where tokens choose evenly and
independently; each row's keys and values once, those of the step's tokens written; where all layers have a window,
the keys that it shows. Prefills and decodes share one step and one maximum: the decodes' reads hide behind the
prefills' products.

What is assumed: every kernel reaches the data sheet's peak, activations stay in the caches, the host's work is hidden
behind the GPU's. So a time is a lower bound; the launches are the one allowance: ten a layer, replayed from a CUDA
graph at 1.3 us each. Swapped blocks cross the host's link at its full speed before the step begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments.simulation.hardware import Gpu
from experiments.simulation.shapes import ModelShape
from tsched.scheduling.scheduler import StepPlan

_KERNELS_PER_LAYER = 10
_LAUNCH_SECONDS = 1.3e-6


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does: tokens; rows that sample; pairs of a token and a key it sees; tokens of context that are seen,
    summed over the rows; states of sequences that are read and written."""

    num_tokens: int
    num_sampled: int
    num_pairs: int
    num_context: int
    num_states: int = 0

    @classmethod
    def of(cls, plan: StepPlan, window: int | None = None) -> Work:
        if window is not None:
            return cls._of_windowed(plan, window)
        context = int(plan.ends.sum())
        num_states = 0 if plan.states is None else plan.rows.size
        if plan.num_tokens == plan.rows.size:
            return cls(plan.num_tokens, plan.sampled.size, context, context, num_states)
        # A row's token i of `counts` sees starts + i + 1 keys.
        pairs = int(np.dot(plan.counts, plan.starts + plan.ends + 1)) // 2
        return cls(plan.num_tokens, plan.sampled.size, pairs, context, num_states)

    @classmethod
    def _of_windowed(cls, plan: StepPlan, window: int) -> Work:
        starts, counts = plan.starts, plan.counts
        rising = np.clip(window - starts, 0, counts)  # [n] tokens that see all before them: starts + 1 keys and so on
        pairs = int(rising @ (2 * starts + rising + 1)) // 2 + window * int((counts - rising).sum())
        context = int(np.minimum(plan.ends, counts + window - 1).sum())
        return cls(plan.num_tokens, plan.sampled.size, pairs, context)


class StepTime:
    """The seconds of a step of `model` on `gpu`, with blocks of `page_size` tokens."""

    def __init__(self, gpu: Gpu, model: ModelShape, page_size: int) -> None:
        heads = model.num_layers * model.query_width
        self._token_seconds = 2 * model.active_weights / gpu.flops_per_s
        self._sample_seconds = 2 * model.head_weights / gpu.flops_per_s
        self._pair_seconds = 4 * heads / gpu.flops_per_s
        self._model = model
        self._byte_seconds = 1 / gpu.memory_bytes_per_s
        self._head_seconds = model.head_bytes / gpu.memory_bytes_per_s
        self._kv_seconds = model.kv_bytes_per_token / gpu.memory_bytes_per_s
        self._launch_seconds = _KERNELS_PER_LAYER * _LAUNCH_SECONDS * model.num_layers
        self._swap_seconds = page_size * model.kv_bytes_per_token / gpu.host_bytes_per_s
        self._copy_seconds = 2 * page_size * self._kv_seconds
        self._state_seconds = 2 * model.state_bytes / gpu.memory_bytes_per_s
        self._state_swap_seconds = model.state_bytes / gpu.host_bytes_per_s

    def step(self, work: Work) -> float:
        """Seconds of a step that does `work`."""
        compute = (
            work.num_tokens * self._token_seconds
            + work.num_sampled * self._sample_seconds
            + work.num_pairs * self._pair_seconds
        )
        memory = self._weights(work.num_tokens) + (work.num_context + work.num_tokens) * self._kv_seconds
        memory += work.num_states * self._state_seconds
        if work.num_sampled:
            memory += self._head_seconds
        return max(compute, memory) + self._launch_seconds

    def _weights(self, num_tokens: int) -> float:
        """Seconds to read the layers' weights that `num_tokens` tokens are multiplied with."""
        return self._byte_seconds * self._model.read_bytes(num_tokens)

    def decodes(self, num_rows: int, first_context: int, count: int) -> NDArray[np.float64]:
        """[count] seconds of steps in which `num_rows` rows decode a token each, the first with `first_context` tokens
        of context between them. Equal to `step` of each, to the last bit.
        """
        context = first_context + num_rows * np.arange(count)
        compute = num_rows * self._token_seconds + num_rows * self._sample_seconds + context * self._pair_seconds
        memory = self._weights(num_rows) + (context + num_rows) * self._kv_seconds + self._head_seconds
        seconds: NDArray[np.float64] = np.maximum(compute, memory) + self._launch_seconds
        return seconds

    def copies(self, num_swapped: int, num_copied: int, num_states: int = 0) -> float:
        """Seconds for blocks and states that cross to or from the host, and for blocks copied on the device."""
        swapped = num_swapped * self._swap_seconds + num_states * self._state_swap_seconds
        return swapped + num_copied * self._copy_seconds
