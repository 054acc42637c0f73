"""The paged key-value cache of every layer, and what moves its whole pages: within it, and to and from the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray

from tkernels.ops.paged_cache import as_bits
from tmodel.batch import KVCache
from tmodel.config import ModelConfig

PagePairs = NDArray[np.int32]
"""[2, n]: pages that are read, pages that are written."""

_STAGED_BYTES = 64 * 2**20
"""Of pages on their way to or from the host: enough to fill the bus, and nothing beside a cache."""


class PagedKVCache(KVCache):
    """A KVCache in one tensor, so that one launch reaches a page of all its layers.

    caches: [C, P, S, Hkv, D] with C = 2 x layers: each layer's keys, then its values.
    """

    def __init__(self, caches: torch.Tensor) -> None:
        self.caches = caches
        self._layers = [(caches[i], caches[i + 1]) for i in range(0, caches.shape[0], 2)]

    @overload
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[torch.Tensor, torch.Tensor]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> tuple[torch.Tensor, torch.Tensor] | list[tuple[torch.Tensor, torch.Tensor]]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)


def allocate_kv_cache(
    config: ModelConfig, num_blocks: int, block_size: int, *, device: torch.device | str, dtype: torch.dtype
) -> PagedKVCache:
    """A cache of P = `num_blocks` pages of S = `block_size` slots.

    Zeroed rather than left as it comes: on a CPU an untouched page costs nothing, and no stale NaN can hide in a slot.
    """
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"a KV cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    shape = (2 * config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return PagedKVCache(torch.zeros(shape, device=device, dtype=dtype))


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes across all layers, keys and values together."""
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class CachePages:
    """Moves whole pages of a cache: to other pages of it, and to and from pages in the host's memory.

    Everything is queued on the device's current stream in the order of the calls, and waits for nobody: a step's page
    copies are called before its forward, and that is all.

    A host page holds all layers of a device page side by side, [Q, C, S, Hkv, D], so a page is one transfer, and a run
    of neighbouring pages too: pages are gathered on the device, sent, and the other way round. The host's memory is
    pinned where the device is a GPU, which can then read and write it by itself.

    cache            the device's pages
    copy_pages       the op, as the model's KernelSet has it
    num_host_blocks  Q; without any nothing can be swapped
    staged_bytes     of the buffer in which pages are gathered, at least a page
    """

    def __init__(
        self,
        cache: PagedKVCache,
        copy_pages: Callable[..., None],
        num_host_blocks: int = 0,
        *,
        staged_bytes: int = _STAGED_BYTES,
    ) -> None:
        if num_host_blocks < 0:
            raise ValueError(f"num_host_blocks must be at least 0, got {num_host_blocks}")
        self._caches = cache.caches
        self._copy_pages = copy_pages
        self._by_page = as_bits(cache.caches).transpose(0, 1)  # [P, C, S, Hkv, D]
        self._device = cache.caches.device
        shape = (num_host_blocks, *self._by_page.shape[1:])
        self._host = torch.zeros(
            shape, dtype=self._by_page.dtype, pin_memory=self._device.type == "cuda" and num_host_blocks > 0
        )
        page_bytes = self._by_page[0].numel() * self._by_page.element_size()
        self._num_staged = max(1, staged_bytes // page_bytes)

    @property
    def num_host_blocks(self) -> int:
        return int(self._host.shape[0])

    def swap_out(self, pages: PagePairs) -> None:
        """Copies pages of the device (pages[0]) to distinct pages of the host (pages[1])."""
        for device_pages, runs in self._staged(pages[0], pages[1]):
            staged = self._by_page.index_select(0, device_pages)  # [n, C, S, Hkv, D]
            for first, count, at in runs:
                self._host[first : first + count].copy_(staged[at : at + count], non_blocking=True)

    def swap_in(self, pages: PagePairs) -> None:
        """Copies pages of the host (pages[0]) to distinct pages of the device (pages[1])."""
        for device_pages, runs in self._staged(pages[1], pages[0]):
            shape = (device_pages.shape[0], *self._by_page.shape[1:])
            staged = torch.empty(shape, dtype=self._by_page.dtype, device=self._device)
            for first, count, at in runs:
                staged[at : at + count].copy_(self._host[first : first + count], non_blocking=True)
            self._by_page.index_copy_(0, device_pages, staged)

    def copy(self, pages: PagePairs) -> None:
        """Copies pages of the device (pages[0]) to distinct others (pages[1]), none of which is read, in one launch."""
        src, dst = self._on_device(pages).unbind()
        self._copy_pages(self._caches, src, dst)

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
