"""The caches of every layer, and what moves whole units of them: within a cache, and to and from the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.paged_cache import as_bits
from tmodel.batch import KVCache, LayerCache
from tmodel.cache_kinds import CacheKind, unit_bytes
from tmodel.config import ModelConfig

PagePairs = NDArray[np.int32]
"""[2, n]: units that are read, units that are written."""

_STAGED_BYTES = 64 * 2**20
"""Of units on their way to or from the host: enough to fill the bus, and nothing beside a cache."""


class CacheTensors(KVCache):
    """A KVCache in few tensors, so that one launch reaches a unit in all its layers.

    blocks  tensors [C, P, ...] with a unit for each of P blocks of tokens, C being those of all layers: of pages
            2 x layers, each layer's keys, then its values
    states  tensors [C, P', ...] with a unit for each of P' states
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
    """A cache of `num_blocks` units of S = `block_size` tokens and `num_states` states, as the config's kinds ask.

    There is one slot for a state more, the last: padding rows leave theirs there.

    Zeroed rather than left as it comes: on a CPU an untouched page costs nothing, and no stale NaN can hide in a slot.

    Raises:
        ValueError: there is no block, no token in one, or no state and a kind that keeps states.
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
    """Those of `kinds` whose units are states of sequences."""
    return [kind for kind in kinds if kind.state_interval is not None]


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes across all layers, keys and values together; 0 where all layers keep states."""
    return unit_bytes(block_kinds(config.cache_kinds), block_size, dtype)


def bytes_per_state(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one sequence's state takes across all layers; 0 where all layers keep pages."""
    return unit_bytes(state_kinds(config.cache_kinds), block_size, dtype)


def state_interval(config: ModelConfig) -> int:
    """Blocks between two states of a sequence that are kept for later prefixes: where each kind keeps one."""
    return math.lcm(*(kind.state_interval or 1 for kind in config.cache_kinds))


class CachePages:
    """Moves whole units of a cache, pages say: to other units of it, and to and from units in the host's memory.

    Everything is queued on the device's current stream in the order of the calls, and waits for nobody: a step's page
    copies are called before its forward, and that is all.

    A host page holds all layers of a device page side by side, [Q, C, S, Hkv, D], so a page is one transfer, and a run
    of neighbouring pages too: pages are gathered on the device, sent, and the other way round. The host's memory is
    pinned where the device is a GPU, which can then read and write it by itself.

    caches           the device's units, tensors of [C, P, ...] for the same P: [C, P, S, Hkv, D] of keys and values
    copy_pages       the op, as the model's KernelSet has it; None where nothing is copied on the device
    num_host_blocks  Q; without any nothing can be swapped
    staged_bytes     of the buffer in which units are gathered, at least a unit
    """

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        copy_pages: Callable[..., None] | None,
        num_host_blocks: int = 0,
        *,
        staged_bytes: int = _STAGED_BYTES,
    ) -> None:
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be at least 0, got {num_host_blocks}")
        self.num_host_blocks = num_host_blocks
        self._caches = caches
        self._copy_pages = copy_pages
        self._device = caches[0].device if caches else torch.device("cpu")
        is_pinned = self._device.type == "cuda" and num_host_blocks > 0
        by_unit = [as_bits(cache).transpose(0, 1) for cache in caches]  # [P, C, S, Hkv, D] each
        self._units = [
            (units, torch.zeros((num_host_blocks, *units.shape[1:]), dtype=units.dtype, pin_memory=is_pinned))
            for units in by_unit
        ]
        unit_bytes = sum(units[0].numel() * units.element_size() for units in by_unit)
        self._num_staged = max(1, staged_bytes // max(1, unit_bytes))

    def swap_out(self, pages: PagePairs) -> None:
        """Copies units of the device (pages[0]) to distinct units of the host (pages[1])."""
        for device_pages, runs in self._staged(pages[0], pages[1]):
            for units, host in self._units:
                staged = units.index_select(0, device_pages)  # [n, C, S, Hkv, D]
                for first, count, at in runs:
                    host[first : first + count].copy_(staged[at : at + count], non_blocking=True)

    def swap_in(self, pages: PagePairs) -> None:
        """Copies units of the host (pages[0]) to distinct units of the device (pages[1])."""
        for device_pages, runs in self._staged(pages[1], pages[0]):
            for units, host in self._units:
                shape = (device_pages.shape[0], *units.shape[1:])
                staged = torch.empty(shape, dtype=units.dtype, device=self._device)
                for first, count, at in runs:
                    staged[at : at + count].copy_(host[first : first + count], non_blocking=True)
                units.index_copy_(0, device_pages, staged)

    def copy(self, pages: PagePairs) -> None:
        """Copies units of the device (pages[0]) to distinct others (pages[1]), none of which is read."""
        src, dst = self._on_device(pages).unbind()
        for cache in self._caches:
            if self._copy_pages is None:
                raise RuntimeError("units are to be copied on the device, and there is no op that does it")
            self._copy_pages(cache, src, dst)

    def _staged(
        self, device_pages: NDArray[np.int32], host_pages: NDArray[np.int32]
    ) -> Iterator[tuple[torch.Tensor, list[tuple[int, int, int]]]]:
        """The pairs in the order of the host's pages, a bufferful at a time: the device's pages as a tensor [n] int64,
        and runs of the host's, each (first page, pages, place of the first in the buffer).
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
            yield self._on_device(device_pages[chosen].astype(np.int64)), runs

    def _on_device(self, array: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
