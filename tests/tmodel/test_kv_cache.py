"""Pages of a cache that go to the host and back, and to each other, in all layers at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import tkernels
from tests.conftest import DEVICE
from tests.tmodel.conftest import WriteCheckpoint
from tkernels.runtime import choose_runtime
from tmodel import (
    CacheKind,
    CachePages,
    Pages,
    UnitPart,
    WindowedPages,
    allocate_kv_cache,
    bytes_per_state,
    cache_window,
    kv_bytes_per_block,
    load_config,
)

COPY = tkernels.OPS["copy_pages"].variants
C, P, S, HKV, D = 4, 7, 2, 2, 4
RUNTIME = choose_runtime(DEVICE)
PAGE_BYTES = C * S * HKV * D


def cache_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bits that name their own place, so that any byte that went elsewhere shows."""
    places = torch.arange(C * P * S * HKV * D).view(C, P, S, HKV, D)
    return (places.double() % 113 / 7).to(dtype).to(DEVICE)


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.cpu().view(torch.uint8).clone()


def pairs(*given: tuple[int, int]) -> np.ndarray:
    return np.array(given, dtype=np.int32).reshape(-1, 2).T.copy()


def test_layers_are_views_of_one_tensor(write_checkpoint: WriteCheckpoint) -> None:
    cache = allocate_kv_cache(load_config(write_checkpoint({})), P, S, device=DEVICE, dtype=torch.float32)
    assert len(cache) == 2
    for layer, (k_cache, v_cache) in enumerate(cache):
        k_cache.fill_(layer)
        v_cache.fill_(-layer)
        assert k_cache.shape == v_cache.shape == (P, S, 2, 16)
    (caches,) = cache.blocks
    assert caches.flatten(1)[:, 0].tolist() == [0, 0, 1, -1]
    assert torch.equal(cache[-1][1], caches[3])


def test_a_cache_lies_where_it_is_asked_for(write_checkpoint: WriteCheckpoint) -> None:
    cache = allocate_kv_cache(load_config(write_checkpoint({})), P, S, device="meta", dtype=torch.float32)
    assert {tensor.device.type for layer in cache for tensor in layer} == {"meta"}


@dataclass(frozen=True)
class Tally:
    """A kind from outside: a state of two tensors a layer."""

    layers: tuple[int, ...]
    state_interval: int | None = 2
    window: int | None = None

    def parts(self, block_size: int, dtype: torch.dtype) -> tuple[UnitPart, ...]:
        return (UnitPart(1, (3, 5), torch.float64), UnitPart(2, (7,), dtype))


def test_each_layer_gets_what_its_kind_keeps(write_checkpoint: WriteCheckpoint) -> None:
    config = load_config(write_checkpoint({}))
    mixed = replace(config, cache_kinds=(Tally((0,)), Pages((1,), 2, 16)))
    cache = allocate_kv_cache(mixed, P, S, 4, device="cpu", dtype=torch.bfloat16)
    assert [[tuple(tensor.shape) for tensor in layer] for layer in cache] == [
        [(5, 3, 5), (5, 7), (5, 7)],
        [(P, S, 2, 16)] * 2,
    ]
    assert [tensor.dtype for tensor in cache[0]] == [torch.float64, torch.bfloat16, torch.bfloat16]
    assert bytes_per_state(mixed, S, torch.bfloat16) * 5 == sum(tensor.nbytes for tensor in cache[0])
    assert kv_bytes_per_block(mixed, S, torch.bfloat16) * P == sum(tensor.nbytes for tensor in cache[1])
    with pytest.raises(ValueError, match="a cache with states needs at least one, got 0"):
        allocate_kv_cache(mixed, P, S, device="cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(("first", "expected"), [(0, 7), (1, None), (2, None)])
def test_pages_are_windowed_where_every_layer_has_a_window(
    first: int, expected: int | None, write_checkpoint: WriteCheckpoint
) -> None:
    """Layers from `first` on have one; where another has none, the blocks are kept for it."""
    fields = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": first}
    config = load_config(write_checkpoint({}, **fields))
    (kind,) = config.cache_kinds
    assert kind.window == cache_window(config) == expected
    assert isinstance(kind, WindowedPages) == (expected is not None)
    assert kind.parts(S, torch.float32) == Pages((0, 1), 2, 16).parts(S, torch.float32)
    beside_states = replace(config, cache_kinds=(Tally((0,)), WindowedPages((1,), 2, 16, 7)))
    assert cache_window(beside_states) is None
    mixed = replace(config, cache_kinds=(WindowedPages((0,), 2, 16, 5), WindowedPages((1,), 2, 16, 7)))
    assert cache_window(mixed) == 7
    with pytest.raises(ValueError, match="a kind's window must be None or at least 1"):
        replace(config, cache_kinds=(WindowedPages((0, 1), 2, 16, 0),))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((Tally((0,)),), r"share out the layers \[0\], a model of 2"),
        ((Tally((0, 1)), Pages((1,), 2, 16)), r"share out the layers \[0, 1, 1\], a model of 2"),
        ((Tally((0, 1), 0),), "state_interval must be None or at least 1, got 0"),
    ],
)
def test_kinds_that_do_not_fit_the_layers_are_refused(
    kinds: tuple[CacheKind, ...], message: str, write_checkpoint: WriteCheckpoint
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(load_config(write_checkpoint({})), cache_kinds=kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("staged_pages", [0, 1, 2, 100])
def test_what_goes_to_the_host_comes_back_to_other_pages(dtype: torch.dtype, staged_pages: int) -> None:
    cache = cache_of(dtype)
    before = bits(cache)
    staged_bytes = staged_pages * PAGE_BYTES * dtype.itemsize
    pages = CachePages([cache], COPY["torch"], RUNTIME, num_host_blocks=6, staged_bytes=staged_bytes)
    pages.swap_out(pairs((5, 1), (0, 4), (3, 2), (6, 0)))
    assert torch.equal(bits(cache), before)
    cache.zero_()
    pages.swap_in(pairs((4, 6), (0, 0), (1, 2), (2, 5)))
    expected = torch.zeros_like(before)
    for source, target in ((0, 6), (6, 0), (5, 2), (3, 5)):
        expected[:, target] = before[:, source]
    assert torch.equal(bits(cache), expected)


def test_a_page_may_be_swapped_out_overwritten_and_back_in_one_step() -> None:
    """The order of a plan: out, in, then copies."""
    cache = cache_of()
    before = bits(cache)
    pages = CachePages([cache], COPY["torch"], RUNTIME, num_host_blocks=3)
    pages.swap_out(pairs((1, 2)))
    pages.swap_out(pairs((4, 0)))
    pages.swap_in(pairs((2, 4)))
    pages.copy(pairs((4, 1), (4, 3)))
    expected = before.clone()
    expected[:, 4] = expected[:, 3] = before[:, 1]
    assert torch.equal(bits(cache), expected)


@pytest.mark.parametrize("variant", list(COPY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_copies_reach_every_layer(variant: str, dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    before = bits(cache)
    CachePages([cache], COPY[variant], RUNTIME).copy(pairs((2, 0), (2, 6), (3, 1)))
    expected = before.clone()
    expected[:, 0] = expected[:, 6] = before[:, 2]
    expected[:, 1] = before[:, 3]
    assert torch.equal(bits(cache), expected)


def test_pages_over_another_kernel_share_their_caches_and_host_memory() -> None:
    cache, called = cache_of(), []
    before = bits(cache)
    pages = CachePages([cache], COPY["torch"], RUNTIME, num_host_blocks=3)
    pages.swap_out(pairs((1, 2)))
    other = pages.with_kernel(lambda *arguments: called.append(arguments))
    other.swap_in(pairs((2, 4)))
    assert torch.equal(bits(cache)[:, 4], before[:, 1])
    pages.copy(pairs((2, 0)))
    assert called == [], "the first ones keep theirs"
    other.copy(pairs((2, 0)))
    assert [arguments[0] is cache for arguments in called] == [True]


def test_neighbouring_host_pages_are_one_transfer() -> None:
    pages = CachePages([cache_of()], COPY["torch"], RUNTIME, num_host_blocks=9)
    ((device_pages, runs),) = pages._stage_runs(*pairs((6, 3), (0, 8), (5, 1), (2, 2), (1, 7)))
    assert device_pages.tolist() == [5, 2, 6, 1, 0]
    assert runs == [(1, 3, 0), (7, 2, 3)]


@pytest.mark.parametrize("given", [pairs((0, 2)), pairs((0, -1)), pairs((1, 0), (0, 7))])
def test_a_host_page_that_is_not_there_is_refused(given: np.ndarray) -> None:
    pages = CachePages([cache_of()], COPY["torch"], RUNTIME, num_host_blocks=2)
    for move in (pages.swap_out, lambda array: pages.swap_in(array[::-1])):
        with pytest.raises(IndexError, match=r"host pages -?\d to -?\d, there are 2"):
            move(given)


def test_the_host_pool_has_a_size() -> None:
    arguments: tuple[Any, ...] = ([cache_of()], COPY["torch"], RUNTIME)
    assert CachePages(*arguments).num_host_blocks == 0
    assert CachePages(*arguments, num_host_blocks=5).num_host_blocks == 5
    with pytest.raises(ValueError, match="num_host_blocks must be at least 0, got -1"):
        CachePages(*arguments, num_host_blocks=-1)
