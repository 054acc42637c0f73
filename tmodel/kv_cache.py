"""The caches of every layer, and copies of whole units: within a cache, and to and from the host."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.paged_cache import as_bits
from tkernels.runtime import Runtime
from tmodel.batch import KVCache, LayerCache
from tmodel.cache_kinds import CacheKind, unit_bytes
from tmodel.config import ModelConfig

PagePairs = NDArray[np.int32]
"""[2, n] int32: units that are read, units that are written."""

_STAGED_BYTES = 64 * 2**20
"""Bytes of the buffer for units on their way to or from the host: enough to fill the bus, and small beside a cache."""


class CacheTensors(KVCache):
    """A KVCache in few tensors, so that one launch reaches a unit in all its layers.

    Args:
        layers: The caches of each layer, views of the tensors below.
        blocks: Tensors [C, P, ...] with a unit for each of P blocks of tokens. C counts the caches of all layers: with
            pages 2 x layers, each layer's keys, then its values.
        states: Tensors [C, P', ...] with a unit for each of P' states.
    """

    def __init__(
        self, layers: Sequence[LayerCache], blocks: Sequence[torch.Tensor], states: Sequence[torch.Tensor] = ()
    ) -> None:
        self.blocks = tuple(blocks)
        self.states = tuple(states)
        self._layers = list(layers)

    @overload
    def __getitem__(self, index: int) -> LayerCache: ...

    @overload
    def __getitem__(self, index: slice) -> list[LayerCache]: ...

    def __getitem__(self, index: int | slice) -> LayerCache | list[LayerCache]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    num_states: int = 0,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> CacheTensors:
    """Allocates the caches that the config's kinds ask for.

    States have one slot more, the last, which padding rows write to. Memory is zeroed: on a CPU an untouched page costs
    nothing, and no stale NaN can hide in a slot.

    Args:
        config: Of the model.
        num_blocks: P, units that hold a block of tokens.
        block_size: S, tokens of a block.
        num_states: P', states of sequences; 0 where no kind keeps states.
        device: Where the caches are.
        dtype: That the model is served in.

    Raises:
        ValueError: There is no block, no token in a block, or no state where a kind keeps states.
    """
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"a KV cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    if num_states < 1 and state_kinds(config.cache_kinds):
        raise ValueError(f"a cache with states needs at least one, got {num_states}")
    layers: dict[int, LayerCache] = dict.fromkeys(range(config.num_layers), ())
    tensors: dict[bool, list[torch.Tensor]] = {False: [], True: []}  # by whether they hold states
    for kind in config.cache_kinds:
        is_state = kind.state_interval is not None
        num_units = num_states + 1 if is_state else num_blocks
        for part in kind.parts(block_size, dtype):
            shape = (part.per_layer * len(kind.layers), num_units, *part.shape)
            tensor = torch.zeros(shape, device=device, dtype=part.dtype)
            tensors[is_state].append(tensor)
            for layer, own in zip(kind.layers, tensor.split(part.per_layer), strict=True):
                layers[layer] += own.unbind()
    return CacheTensors(list(layers.values()), tensors[False], tensors[True])


def block_kinds(kinds: Iterable[CacheKind]) -> list[CacheKind]:
    """Those of `kinds` whose units hold blocks of tokens."""
    return [kind for kind in kinds if kind.state_interval is None]


def state_kinds(kinds: Iterable[CacheKind]) -> list[CacheKind]:
    """Those of `kinds` whose units hold states of sequences."""
    return [kind for kind in kinds if kind.state_interval is not None]


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block across all layers, keys and values together; 0 where all layers keep states."""
    return unit_bytes(block_kinds(config.cache_kinds), block_size, dtype)


def bytes_per_state(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one sequence's state across all layers; 0 where all layers keep pages."""
    return unit_bytes(state_kinds(config.cache_kinds), block_size, dtype)


def state_interval(config: ModelConfig) -> int:
    """Blocks between two states that are kept for later prefixes: the least multiple of every kind's interval."""
    return math.lcm(*(kind.state_interval or 1 for kind in config.cache_kinds))


def cache_window(config: ModelConfig) -> int | None:
    """The tokens before which the blocks of a sequence are given back; None where some layers read them to its end.

    Blocks of all kinds are lent together, so the widest window counts; beside states they are kept.
    """
    windows = [kind.window for kind in config.cache_kinds if kind.state_interval is None]
    sizes = [size for size in windows if size is not None]
    return max(sizes) if sizes and len(sizes) == len(config.cache_kinds) else None


class CachePages:
    """Copies whole units of a cache, such as pages: to other units of it, and to and from the host's memory.

    Each call queues its copies on the device's current stream and returns at once. So a step's copies need only be
    called before its forward.

    A host page holds all layers of a device page side by side, [Q, C, S, Hkv, D], so a run of neighbouring pages is one
    transfer. Swapping out gathers pages in a buffer on the device and sends it; swapping in goes the other way. A
    GPU reads and writes the host's memory without the CPU.

    Args:
        caches: The device's units, tensors [C, P, ...] for the same P: [C, P, S, Hkv, D] of keys and values.
        copy_pages: The op of the model's KernelSet; None where nothing is copied on the device.
        runtime: Of the device.
        num_host_blocks: Q; with 0 nothing can be swapped.
        staged_bytes: Of the buffer, which holds one unit at least.

    Raises:
        ValueError: num_host_blocks is negative.
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        copy_pages: Callable[..., None] | None,
        runtime: Runtime,
        num_host_blocks: int = 0,
        *,
        staged_bytes: int = _STAGED_BYTES,
    ) -> None:
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be at least 0, got {num_host_blocks}")
        self.num_host_blocks = num_host_blocks
        self._caches = caches
        self._copy_pages = copy_pages
        self._runtime = runtime
        by_unit = [as_bits(cache).transpose(0, 1) for cache in caches]  # [P, C, S, Hkv, D] each
        self._units = [
            (units, runtime.allocate_host((num_host_blocks, *units.shape[1:]), units.dtype)) for units in by_unit
        ]
        unit_bytes = sum(units[0].numel() * units.element_size() for units in by_unit)
        self._num_staged = max(1, staged_bytes // max(1, unit_bytes))

    def with_kernel(self, copy_pages: Callable[..., None]) -> CachePages:
        """The same caches and host memory, copied by another variant of the op."""
        pages = copy.copy(self)
        pages._copy_pages = copy_pages
        return pages

    def swap_out(self, pages: PagePairs) -> None:
        """Copies units of the device (pages[0]) to distinct units of the host (pages[1])."""
        for device_pages, runs in self._stage_runs(pages[0], pages[1]):
            for units, host in self._units:
                staged = units.index_select(0, device_pages)  # [n, C, S, Hkv, D]
                for first, count, at in runs:
                    host[first : first + count].copy_(staged[at : at + count], non_blocking=True)

    def swap_in(self, pages: PagePairs) -> None:
        """Copies units of the host (pages[0]) to distinct units of the device (pages[1])."""
        for device_pages, runs in self._stage_runs(pages[1], pages[0]):
            for units, host in self._units:
                shape = (device_pages.shape[0], *units.shape[1:])
                staged = torch.empty(shape, dtype=units.dtype, device=units.device)
                for first, count, at in runs:
                    staged[at : at + count].copy_(host[first : first + count], non_blocking=True)
                units.index_copy_(0, device_pages, staged)

    def copy(self, pages: PagePairs) -> None:
        """Copies units of the device (pages[0]) to distinct others (pages[1]), none of which is in pages[0].

        Raises:
            RuntimeError: The object was made without `copy_pages`.
        """
        src, dst = self._runtime.send(pages).unbind()
        for cache in self._caches:
            if self._copy_pages is None:
                raise RuntimeError("units are to be copied on the device, and there is no op that does it")
            self._copy_pages(cache, src, dst)

    def _stage_runs(
        self, device_pages: NDArray[np.int32], host_pages: NDArray[np.int32]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """Splits pairs of pages into bufferfuls, in the order of the host's pages.

        Yields:
            (the device's pages [n] int64, on the device; runs of the host's pages, each (first page, number of pages,
            place of the first in the buffer)).

        Raises:
            IndexError: There is no such host page.
        """
        if host_pages.size and not 0 <= int(host_pages.min()) <= int(host_pages.max()) < self.num_host_blocks:
            raise IndexError(
                f"host pages {int(host_pages.min())} to {int(host_pages.max())}, there are {self.num_host_blocks}"
            )
        order = np.argsort(host_pages, kind="stable")
        for begin in range(0, order.size, self._num_staged):
            chosen = order[begin : begin + self._num_staged]
            hosts = host_pages[chosen]
            starts = np.flatnonzero(np.diff(hosts, prepend=np.int32(-2)) != 1)  # of runs, as places in the buffer
            counts = np.diff(starts, append=hosts.size)
            runs = list(zip(hosts[starts].tolist(), counts.tolist(), starts.tolist(), strict=True))
            yield self._runtime.send(device_pages[chosen].astype(np.int64)), runs
